"""Already-quantized checkpoints: which family a folder is of, and its parameters as codes and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from castiron.errors import CheckpointError

from ...files import FileReader
from ..config import read_json_object
from ..safetensors_file import TensorInfo
from . import awq, compressed_tensors, fp8, gguf, gptq, modelopt, mxfp4
from .expression import transpose
from .module import modules_of
from .scheme import CacheNumbers, Read, Reader
from .tensor import MadeTensor, Rounding

__all__ = ["CacheNumbers", "MadeTensor", "Read", "Rounding", "read_quantized"]

#: By quant_method.
READERS: Final[Mapping[str, Reader]] = {
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "gptqmodel": gptq.read,
    "modelopt": modelopt.read,
    "modelopt_fp4": modelopt.read,
    "mxfp4": mxfp4.read,
    "sparseml": compressed_tensors.read,
}
#: Model types whose projections are Conv1D modules: their parameters are the transposed weights.
_TRANSPOSED: Final = ("gpt2", "openai-gpt")
#: Where tools put the config before config.json had a place for it.
_OWN_FILES: Final = (
    ("hf_quant_config.json", "modelopt"),
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
)


@dataclass(frozen=True)
class _Found:
    config: Mapping[str, Any]
    method: object
    where: str


def read_quantized(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], files: FileReader
) -> Read | None:
    """The quantized parameters of a checkpoint, or None where its config says of no quantization.

    Raises ``CheckpointError`` for a method, a field, a tensor or a label that is not understood or that
    contradicts the others.
    """
    blocks = gguf.read(folder)
    if blocks is not None:
        return blocks
    found = _quantization(folder, config)
    if found is None:
        return None
    reader = READERS.get(found.method) if isinstance(found.method, str) else None
    if reader is None:
        raise CheckpointError(
            f"{found.where}: quant_method is {found.method!r}; this version reads "
            f"{', '.join(sorted(READERS))}. Use the unquantized checkpoint of the model, or one of these."
        )
    read = reader(found.config, found.where, modules_of(tensors, files))
    if config.get("model_type") in _TRANSPOSED:
        read = replace(read, tensors=tuple(map(_as_conv1d, read.tensors)))
    return read


def _as_conv1d(tensor: MadeTensor) -> MadeTensor:
    """The parameter as transformers' Conv1D has it, [K, N]; tools store its codes like a Linear's."""
    if tensor.name.endswith("lm_head.weight"):
        return tensor
    if tensor.input_scale is not None:
        raise CheckpointError(f"{tensor.name!r} is a Conv1D with an input scale, which is not read.")
    return replace(tensor, weight=transpose(tensor.weight))


def _quantization(folder: Path, config: Mapping[str, Any]) -> _Found | None:
    """The quantization config and where it stands: config.json (two names), or a tool's own file."""
    for name, method in (("quantization_config", None), ("compression_config", "compressed-tensors")):
        values = config.get(name)
        if values:
            where = f"{folder / 'config.json'}: {name}"
            if not isinstance(values, Mapping):
                raise CheckpointError(f"{where}: found {values!r}; expected an object.")
            return _Found(values, values.get("quant_method", method), where)
    for file, method in _OWN_FILES:
        path = folder / file
        if path.is_file():
            return _Found(read_json_object(path), method, str(path))
    return None
