"""The stored tensors of one quantized module, taken one by one with their dtypes and shapes checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from castiron.errors import CheckpointError

from ...files import FileReader
from ...weights.unpack import unpack
from ..safetensors_file import TensorInfo
from .expression import Value, float32, reshape, stored

FLOATS = ("float32", "float16", "bfloat16")


class Module:
    """What is stored under "<name>.": suffix -> tensor."""

    def __init__(self, name: str, tensors: Mapping[str, TensorInfo], files: FileReader) -> None:
        self.name = name
        self._tensors, self._files = tensors, files
        self._taken: dict[str, TensorInfo] = {}

    def __contains__(self, suffix: str) -> bool:
        return suffix in self._tensors

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What is stored, by name."""
        return tuple(self._tensors)

    def peek(self, suffix: str) -> TensorInfo:
        """A tensor that is there, unchecked."""
        return self._tensors[suffix]

    def take(self, suffix: str, dtypes: Sequence[str], *shapes: Sequence[int | None]) -> TensorInfo:
        """A tensor that must be there, of one of the dtypes and shapes (None: any size)."""
        found = self._tensors.get(suffix)
        if found is None:
            raise CheckpointError(
                f"module {self.name!r} is quantized, but {self.name}.{suffix} is not stored; found "
                f"{', '.join(sorted(self._tensors))}. The checkpoint is incomplete."
            )
        if found.dtype.name not in dtypes:
            raise CheckpointError(
                f"tensor {found.name!r} is stored as {found.dtype.name}; expected {' or '.join(dtypes)}."
            )
        if not any(_fits(found.shape, shape) for shape in shapes):
            texts = [", ".join("any size" if s is None else str(s) for s in shape) for shape in shapes]
            expected = " or ".join(f"[{text}]" for text in texts)
            raise CheckpointError(
                f"tensor {found.name!r} has shape {list(found.shape)}; expected {expected}."
            )
        self._taken[suffix] = found
        return found

    def accept(self, suffix: str) -> TensorInfo:
        """A tensor that is there, of any dtype and shape."""
        self._taken[suffix] = self._tensors[suffix]
        return self._tensors[suffix]

    def array(self, tensor: TensorInfo) -> npt.NDArray[Any]:
        """The numbers of a small tensor."""
        out = np.empty(tensor.shape, tensor.dtype)
        if out.size:
            self._files.read_into(tensor.file, tensor.offset, out)
        return out

    def unpacked(self, tensor: TensorInfo, layout: str) -> npt.NDArray[Any]:
        """A small tensor decoded."""
        return unpack(self.array(tensor), layout)

    def scalar(self, suffix: str) -> float:
        """A positive finite number that is stored as a tensor of one element."""
        tensor = self.take(suffix, FLOATS, (), (1,), (1, 1))
        value = float(self.array(tensor).astype(np.float32).reshape(()))
        if not 0 < value < float("inf"):
            raise CheckpointError(f"tensor {tensor.name!r} is {value}; expected a positive scale.")
        return value

    def input_scale(self, suffix: str, inputs: int) -> Value:
        """What each input is multiplied by, [K], as a value; all positive."""
        tensor = self.take(suffix, FLOATS, (inputs,), (1, inputs))
        numbers = self.array(tensor).astype(np.float32)
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            raise CheckpointError(f"tensor {tensor.name!r} holds scales that are not positive.")
        return float32(reshape(stored(tensor), (inputs,)))

    @property
    def taken(self) -> tuple[TensorInfo, ...]:
        """What was taken so far."""
        return tuple(self._taken.values())


def _fits(shape: tuple[int, ...], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        size is None or size == found for found, size in zip(shape, wanted, strict=True)
    )


def modules_of(tensors: Mapping[str, TensorInfo], files: FileReader) -> dict[str, Module]:
    """Every module of a checkpoint by name."""
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        grouped.setdefault(module, {})[suffix] = tensor
    return {name: Module(name, held, files) for name, held in grouped.items()}
