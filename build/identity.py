"""Facts about the checkpoint that the engine's manifest keeps."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..engines import ModelIdentity, SpecialTokens

if TYPE_CHECKING:
    from ..graph.checkpoint import Checkpoint
    from .source_tokenizer import SourceTokenizer


def parameter_count(checkpoint: Checkpoint) -> int:
    """Numbers stored in the checkpoint."""
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())


def model_identity(checkpoint: Checkpoint, dtype: Literal["float32", "bfloat16", "float16"]) -> ModelIdentity:
    """Who the checkpoint is."""
    config_file = checkpoint.folder / "config.json"
    source = Path(checkpoint.source)
    return ModelIdentity(
        name=source.resolve().name if source.exists() else checkpoint.source,
        source=str(source.resolve()) if source.exists() else checkpoint.source,
        architecture=checkpoint.names.class_name,
        model_type=str(checkpoint.config["model_type"]),
        config_sha256=hashlib.sha256(config_file.read_bytes()).hexdigest(),
        source_sha256=checkpoint.fingerprint,
        source_dtype=checkpoint.source_dtype,
        dtype=dtype,
        parameters=parameter_count(checkpoint),
    )


def special_tokens(
    checkpoint: Checkpoint, vocab_size: int, tokenizer: SourceTokenizer | None
) -> SpecialTokens:
    """Token ids that end or begin a text; columns of the logits that the tokenizer knows."""
    text = checkpoint.hf_config
    known = None if tokenizer is None else tokenizer.size
    return SpecialTokens(
        eos_token_ids=list(checkpoint.eos_token_ids),
        bos_token_id=_token(getattr(text, "bos_token_id", None), vocab_size),
        pad_token_id=_token(getattr(text, "pad_token_id", None), vocab_size),
        vocab_size=vocab_size,
        vocab_size_used=vocab_size if known is None else min(known, vocab_size),
    )


def _token(value: object, vocab_size: int) -> int | None:
    return value if isinstance(value, int) and 0 <= value < vocab_size else None
