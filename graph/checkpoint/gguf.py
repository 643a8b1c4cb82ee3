"""GGUF files: loaded by transformers, written as a Hugging Face folder without losing a bit.

Quantized matrices stay in the GGUF file: the folder says where (``quantized/gguf.py``). What cannot be told
there (other types of blocks, transposed matrices) is kept dequantized, in float32 where bfloat16 does not
hold the numbers. The whole model is in memory once, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from castiron.errors import CheckpointError

from .converted import converted, copy_companions, save_tensors
from .gguf_blocks import find_blocks
from .gguf_file import check_gguf
from .gguf_tokenizer import save_tokenizer
from .quantized.gguf import write_table
from .shards import SINGLE


def convert_gguf(file: Path) -> tuple[Path, tuple[str, ...]]:
    """A safetensors folder with model, config and tokenizer of a GGUF file.

    A ``tokenizer.json`` beside the file is used in place of the one in the file. Raises ``CheckpointError``
    if transformers does not know the architecture, or if the tokenizer cannot be rebuilt faithfully.
    """
    file = file.absolute()
    beside = file.with_name("tokenizer.json")
    sources = [file, beside] if beside.is_file() else [file]

    def convert(target: Path) -> None:
        check_gguf(file)
        with _parsed_once():
            if beside.is_file():
                copy_companions(file.parent, target, skip="config.json")
            else:
                save_tokenizer(file, target)  # first: it is quick, and it is what may be refused
            model = _load(file)
            parameters = _without_tied_copies(model)
            blocks, orders = find_blocks(file, parameters)
        if blocks:
            write_table(target, file, blocks, orders)
        save_tensors(
            target / SINGLE, {name: tensor for name, tensor in parameters.items() if name not in blocks}
        )
        config = model.config.to_dict()
        config.pop("quantization_config", None)
        config["architectures"] = [type(model).__name__]
        (target / "config.json").write_text(json.dumps(config, indent=2, default=str))
        model.generation_config.save_pretrained(target)

    return converted(sources, convert)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """While it lasts, a file is parsed once, and transformers builds its name table once.

    It does the first three times and the second for every module of the model: half the time of a conversion
    (135M parameters: 33 s of CPU time without this).
    """
    import gguf

    class Reader(gguf.GGUFReader):
        # A slice for every token of the vocabulary: of an np.memmap each costs as much as ten of an array.
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    read = cache(Reader)
    with (
        mock.patch.object(gguf, "GGUFReader", lambda file: read(Path(file))),
        mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield


def _load(file: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),  # some architectures would keep packed blocks
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # gguf and transformers raise many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{file}: transformers cannot load this GGUF file: {reason}. Use the model's Hugging Face folder."
        ) from error
    model, info = loaded
    _check_complete(file, model, info)
    return model


def _check_complete(file: Path, model: Any, info: Any) -> None:
    """transformers draws what a file lacks at random and goes on; a tied head alone may be missing."""
    tied = (
        set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    )
    missing = sorted(set(info["missing_keys"]) - tied)
    unlike = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    for what, names in (("lacks", missing), ("has another shape of", unlike)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{file}: the file {what} {', '.join(names[:3])}{more}, which its architecture needs. It is "
                "incomplete or damaged; download it again."
            )


def _without_tied_copies(model: Any) -> dict[str, Any]:
    """The state dict with every shared tensor once, under its first name."""
    seen: set[tuple[int, int]] = set()
    kept = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.numel())
        if tensor.numel() == 0 or key not in seen:
            kept[name] = tensor
        seen.add(key)
    return kept
