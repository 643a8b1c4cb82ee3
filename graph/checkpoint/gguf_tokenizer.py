"""The tokenizer inside a GGUF file, with the pre-tokenizer that the file names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from castiron.errors import CheckpointError

#: Values of ``tokenizer.ggml.pre`` (names of llama.cpp) whose text is split by GPT-2's rule alone.
_GPT2: Final = frozenset({"gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion"})
#: Values where each digit is cut out first. transformers' reader does not know them and would use GPT-2's
#: rule: a tokenizer that looks right and gives other tokens for every number.
_DIGITS_THEN_GPT2: Final = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_BYTE_LEVEL: Final = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_DIGITS: Final = {"type": "Digits", "individual_digits": True}


def save_tokenizer(file: Path, target: Path) -> None:
    """Write tokenizer.json and its companions; ``CheckpointError`` if the file's pre-tokenizer is unknown."""
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata: dict[str, Any] = _call(read_gguf_metadata, file)
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind is None:
        return  # no tokenizer in the file: the engine takes and gives token ids
    if kind == "gpt2":
        _require_known(file, pre)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as error:  # transformers raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{file}: transformers cannot rebuild its tokenizer: {reason}. Put the model's tokenizer.json "
            "beside the file."
        ) from error
    tokenizer.save_pretrained(target)
    if kind == "gpt2" and pre in _DIGITS_THEN_GPT2:
        path = target / "tokenizer.json"
        description = json.loads(path.read_text(encoding="utf-8"))
        description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]}
        path.write_text(json.dumps(description, ensure_ascii=False), encoding="utf-8")


def _call(read_metadata: Any, file: Path) -> dict[str, Any]:
    try:
        metadata, _ = read_metadata(str(file))
    except Exception as error:  # a damaged file ends in many kinds of error
        raise CheckpointError(f"{file}: not a readable GGUF file ({error}). Download it again.") from error
    return dict(metadata)


def _require_known(file: Path, pre: object) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if pre not in _GPT2 | _DIGITS_THEN_GPT2 | set(GGUF_PRE_TOKENIZER_SPLITS):
        raise CheckpointError(
            f"{file}: tokenizer.ggml.pre is {pre!r}, a way to split text that is not known here; a guess "
            "would give wrong tokens. Put the model's tokenizer.json beside the file."
        )
