"""Facts about the checkpoint that the engine's manifest keeps."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from castiron.errors import CheckpointError, EngineError, RequestError

from ..engines import ModelIdentity, SpecialTokens

if TYPE_CHECKING:
    from ..graph.checkpoint import Checkpoint

#: A natural text for the golden outputs: plain prose, so that every tokenizer has words for it.
GOLDEN_TEXT = (
    "Iron has been cast for more than two thousand years. The founder makes a mould of damp sand, melts "
    "the metal in a furnace, and pours it in one steady stream. When the casting is cold the mould is "
    "broken, and what was liquid an hour ago will hold its shape for a century. A good casting needs no "
    "apology: it is made once, for one purpose, and then it simply works. In 1779 the first large bridge "
    "of cast iron was built over a river in England; it carries people to this day. Water boils at 100 "
    "degrees, iron melts at 1538, and a patient worker learns to judge both by eye. "
    "def area(width, height):\n    return width * height\n"
    "A pattern is cut from pine, a little larger than the part, because iron shrinks by about one percent as "
    "it cools. Two half boxes of sand are rammed around it, parted, and closed again over the hollow that it "
    "leaves. Wer Eisen gießt, braucht Geduld. Le fer fondu coule comme de l'eau. El molde se rompe una sola "
    "vez. The foreman asked: 'Is the ladle hot?' - 'Since six this morning,' said the boy, and stepped back. "
    "| metal | melts at |\n| tin | 232 |\n| zinc | 420 |\n| copper | 1085 |\n"
    "for part in castings:\n    if part.weight > limit:\n        part.reject('too heavy')\n"
    "Grey iron is strong when it is pressed and weak when it is pulled, so a bridge of it stands in arches, "
    "each stone-like piece leaning on the next. Steel ended that age within thirty years, yet pumps, stoves, "
    "engine blocks and the covers of drains are still poured as they were, one after the other, from the "
    "same furnace, by people who know by the colour of the stream when it is time.\n"
)


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


def special_tokens(checkpoint: Checkpoint, vocab_size: int) -> SpecialTokens:
    """Token ids that end or begin a text; columns of the logits that the tokenizer knows."""
    text = checkpoint.hf_config
    known = tokenizer_size(checkpoint)
    return SpecialTokens(
        eos_token_ids=list(checkpoint.eos_token_ids),
        bos_token_id=_token(getattr(text, "bos_token_id", None), vocab_size),
        pad_token_id=_token(getattr(text, "pad_token_id", None), vocab_size),
        vocab_size=vocab_size,
        vocab_size_used=vocab_size if known is None else min(known, vocab_size),
    )


def check_tokenizer(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError where the tokenizer or its chat template is damaged, or where it writes a text
    in ids that the model lacks.

    Ids beyond the vocabulary that no text of ours has, such as added tokens, are let be.
    """
    largest, size = max(golden_ids(checkpoint) or (), default=-1), checkpoint.config.get("vocab_size")
    if isinstance(size, int) and largest >= size:
        raise CheckpointError(
            f"{checkpoint.folder / 'tokenizer.json'}: writes a text with the token id {largest}, but "
            f"config.json sets vocab_size to {size}. It belongs to another model: download the model's, or "
            f"remove it"
        )
    if (checkpoint.folder / "tokenizer.json").is_file():
        _check_chat_templates(checkpoint.folder)


def _check_chat_templates(folder: Path) -> None:
    from ..runtime.tokenizer import Tokenizer

    try:
        for template in Tokenizer(folder).chat_templates.values():
            template.check()
    except (EngineError, RequestError) as error:
        raise CheckpointError(
            f"{folder}: {error}. The files beside tokenizer.json are damaged: download them again, or remove "
            f"chat_template.jinja to build without a chat template"
        ) from error


def tokenizer_size(checkpoint: Checkpoint) -> int | None:
    """One more than the largest id of the tokenizer, or None where the folder has none."""
    tokenizer = _tokenizer(checkpoint)
    if tokenizer is None:
        return None
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1 or None


def golden_ids(checkpoint: Checkpoint) -> list[int] | None:
    """The golden text as token ids, or None without a tokenizer."""
    tokenizer = _tokenizer(checkpoint)
    return None if tokenizer is None else list(tokenizer.encode(GOLDEN_TEXT).ids)


def _tokenizer(checkpoint: Checkpoint):  # type: ignore[no-untyped-def]  # tokenizers has no type information
    file = checkpoint.folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(
            f"{file}: cannot be read as a tokenizer: {error}. Download it again."
        ) from error


def _token(value: object, vocab_size: int) -> int | None:
    return value if isinstance(value, int) and 0 <= value < vocab_size else None
