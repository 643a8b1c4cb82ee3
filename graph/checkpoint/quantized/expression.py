"""What a quantized parameter is made of, as data: a small tree of graph ops over stored tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from castiron.errors import CheckpointError

from ... import ops
from ...weights.formats import CODE_DTYPES
from ...weights.quantized import group_count
from ...weights.unpack import LAYOUTS
from ..safetensors_file import TensorInfo

Array = npt.NDArray[Any]
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, eq=False)
class Value:
    """A stored tensor, a small constant, or an op over other values.

    Attributes:
        shape, dtype: of the value.
        op, domain, inputs, attributes: of the node that makes it; ``op`` "" for the two kinds of leaves.
        tensor: the leaf's stored tensor.
        array: the leaf's numbers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    op: str = ""
    domain: str = ""
    inputs: tuple[Value, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    tensor: TensorInfo | None = None
    array: Array | None = None

    def tensors(self) -> Iterator[TensorInfo]:
        """Every stored tensor below."""
        if self.tensor is not None:
            yield self.tensor
        for value in self.inputs:
            yield from value.tensors()


def stored(tensor: TensorInfo) -> Value:
    """A stored tensor; 8-bit floats as their bytes, which ``Dequantize`` and ``Unpack`` take."""
    if tensor.dtype.name.startswith("float8"):
        tensor = replace(tensor, dtype=np.dtype(np.uint8))
    return Value(tensor.shape, tensor.dtype, tensor=tensor)


def constant(array: Array) -> Value:
    """A small array."""
    return Value(array.shape, array.dtype, array=array)


def number(value: float) -> Value:
    """A scalar."""
    return constant(np.full((), value, np.float32))


def unpack(raw: Value, layout: str) -> Value:
    """``raw`` decoded by a layout of ``graph.weights.unpack``."""
    found = LAYOUTS[layout]
    attributes = {"layout": layout}
    return Value(found.shape(raw.shape), found.dtype, "Unpack", ops.DOMAIN, (raw,), attributes)


def float32(value: Value) -> Value:
    """``value`` cast to float32, which is exact for everything that is stored as scales."""
    if value.dtype == _FLOAT32:
        return value
    return Value(value.shape, _FLOAT32, "Cast", "", (value,), {"to": int(TensorProto.FLOAT)})


def arithmetic(op: str, left: Value, right: Value) -> Value:
    """Add, Sub, Mul or Div of float32 values, with broadcasting."""
    shape = np.broadcast_shapes(left.shape, right.shape)
    return Value(shape, _FLOAT32, op, "", (float32(left), float32(right)))


def transpose(value: Value) -> Value:
    """A matrix, or every one of a stack of them, with rows and columns exchanged."""
    *stack, rows, columns = value.shape
    perm = [*range(len(stack)), len(stack) + 1, len(stack)]
    return Value((*stack, columns, rows), value.dtype, "Transpose", "", (value,), {"perm": perm})


def reshape(value: Value, shape: Sequence[int]) -> Value:
    """The same elements under another shape."""
    if tuple(shape) == value.shape:
        return value
    return Value(tuple(shape), value.dtype, "Reshape", "", (value, constant(np.array(shape, np.int64))))


def gather(value: Value, indices: Array, axis: int) -> Value:
    """Rows (axis 0) or columns (axis 1) by index."""
    shape = tuple(len(indices) if i == axis else size for i, size in enumerate(value.shape))
    picked = constant(np.asarray(indices, np.int64))
    return Value(shape, value.dtype, "Gather", "", (value, picked), {"axis": axis})


def concat(values: Sequence[Value]) -> Value:
    """Matrices one below the other; of several dtypes, in float32."""
    if len({value.dtype for value in values}) > 1:
        values = [float32(value) for value in values]
    shape = (sum(value.shape[0] for value in values), *values[0].shape[1:])
    return Value(shape, values[0].dtype, "Concat", "", tuple(values), {"axis": 0})


def first(value: Value, count: int, axis: int) -> Value:
    """The first ``count`` rows or columns: what is left when padding is cut off."""
    if count == value.shape[axis]:
        return value
    shape = tuple(count if i == axis else size for i, size in enumerate(value.shape))
    places = [constant(np.array([place], np.int64)) for place in (0, count, axis)]
    return Value(shape, value.dtype, "Slice", "", (value, *places))


def repeated_rows(value: Value, rows: int, each: int) -> Value:
    """Every row ``each`` times, ``rows`` rows in all: a scale of a block of rows becomes one of each row."""
    return gather(value, np.arange(rows) // each, 0)


def dequantize(codes: Value, scale: Value, offset: Value | None, format: str, group: int) -> Value:
    """float32 [N, K]: value(code) * scale (+ offset)."""
    scales = [float32(value) for value in (scale, offset) if value is not None]
    expected = (codes.shape[0], group_count(codes.shape[1], group))
    if codes.dtype != CODE_DTYPES[format] or any(value.shape != expected for value in scales):
        found = ", ".join(str(list(value.shape)) for value in scales)
        name = next(codes.tensors()).name
        raise CheckpointError(
            f"tensor {name!r} holds {codes.dtype.name} codes {list(codes.shape)} with scales {found}; "
            f"expected {CODE_DTYPES[format].name} and {list(expected)} for groups of {group or 'all'} inputs."
        )
    attributes = {"format": format, "group": group}
    return Value(codes.shape, _FLOAT32, "Dequantize", ops.DOMAIN, (codes, *scales), attributes)
