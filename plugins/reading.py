"""What an op asks for, whatever computes it: how tactics of every family read operands and attributes."""

from __future__ import annotations

from collections.abc import Mapping

from ..graph.ops import MATRICES
from .tactic import Attr, Dims, Op, Operand, element_count

#: ONNX's elementwise and reducing ops by the names that kernels have for them (docs/program.md).
UNARY: Mapping[str, str] = {
    "Neg": "neg",
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Abs": "abs",
    "Reciprocal": "reciprocal",
    "Softplus": "softplus",
    "Sin": "sin",
    "Cos": "cos",
    "Erf": "erf",
}
BINARY: Mapping[str, str] = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "Min": "min",
    "Max": "max",
    "Pow": "pow",
}
REDUCE: Mapping[str, str] = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "max"}
_LARGEST = 3.4028234663852886e38
_FLAGS = ("interleaved", "concat_halves")


def matrices(op: Op) -> list[Operand]:
    """The weight of a product, or gate's and up's."""
    at = _matrices_at(op)
    return [op.required(index) for index in range(at.start, at.stop)]


def matrix_elements(op: Op) -> int:
    """Elements of all matrices of a product, of all its experts."""
    return sum(element_count(matrix.shape, 1) for matrix in matrices(op))


def biases(op: Op) -> tuple[Operand, ...]:
    """The biases that a product has, in the order of its matrices."""
    at = _matrices_at(op)
    given = (op.input(index + at.stop - at.start) for index in range(at.start, at.stop))
    return tuple(bias for bias in given if bias is not None)


def biases_in_pairs(op: Op) -> bool:
    """Whether gate and up of a product both have a bias, or neither."""
    return len(biases(op)) in (0, len(matrices(op)))


def _matrices_at(op: Op) -> slice:
    return MATRICES[op.kind.removeprefix("castiron.")]


def reduces_last_axis(op: Op) -> bool:
    """Whether the axes of a reduction, or the axis of a Softmax, are the last one alone."""
    rank = len(op.required(0).shape)
    axes = op.input(1)
    if axes is None:
        return op.attrs.get("axis", -1) in (-1, rank - 1)
    return axes.values is not None and [int(v) % rank for v in axes.values.reshape(-1)] == [rank - 1]


def has_clip_bounds(op: Op) -> bool:
    """Whether the bounds of a Clip are absent or inlined numbers."""
    bounds = [op.input(i) for i in (1, 2)]
    return all(bound is None or bound.scalar is not None for bound in bounds)


def clip_bounds(op: Op) -> tuple[float, float]:
    """The bounds of a Clip; the largest float32 where there is none."""
    low, high = op.input(1), op.input(2)
    least = -_LARGEST if low is None or low.scalar is None else max(low.scalar, -_LARGEST)
    most = _LARGEST if high is None or high.scalar is None else min(high.scalar, _LARGEST)
    return least, most


def slice_bounds(op: Op) -> list[tuple[int, int, int]] | None:
    """(axis, start, step) of a Slice with inlined bounds, or None."""
    given = [op.input(i) for i in range(1, 5)]
    if given[0] is None or any(g is not None and g.values is None for g in given):
        return None
    shape = op.required(0).shape
    numbers = [
        None if g is None or g.values is None else [int(v) for v in g.values.reshape(-1)] for g in given
    ]
    starts = numbers[0] or []
    axes = numbers[2] or list(range(len(starts)))
    steps = numbers[3] or [1] * len(starts)
    bounds = []
    for start, axis, step in zip(starts, axes, steps, strict=True):
        size = shape[axis]
        if step < 1 or not isinstance(size, int):
            return None
        bounds.append((axis % len(shape), min(max(start + size if start < 0 else start, 0), size), step))
    return bounds


def first_column(shape: Dims, bounds: list[tuple[int, int, int]]) -> int | None:
    """Where a cut begins that is a run of columns of a matrix, so that a view serves; else None."""
    if len(shape) == 2 and len(bounds) == 1 and bounds[0][0] == 1 and bounds[0][2] == 1:
        return bounds[0][1]
    return None


def as_rows(shape: Dims) -> Dims | None:
    """The two-dimensional form [R, C] of a shape whose first size alone may be symbolic."""
    if len(shape) < 2 or any(isinstance(dim, str) for dim in shape[1:]):
        return None
    columns = 1
    for dim in shape[1:]:
        columns *= int(dim)
    return (shape[0], columns)


def norm_group(op: Op) -> int:
    """Columns that a norm is taken over: ``group``, or the whole last axis."""
    return int(op.attrs.get("group", 0)) or int(op.required(0).shape[-1])


def is_norm_of_rows(op: Op) -> bool:
    """Whether a norm is over runs of columns of rows, with weights of a run's length."""
    x = op.required(0)
    if as_rows(x.shape) is None or x.constant:
        return False
    group = norm_group(op)
    return all(w is None or w.shape in ((group,), (1, group)) for w in op.inputs[1:])


def is_lookup(op: Op) -> bool:
    """Whether an Embedding looks up rows of a constant table by a list of ids."""
    ids, table = op.required(0), op.required(1)
    return len(ids.shape) == 1 and ids.dtype == "i32" and table.constant and len(table.shape) == 2


def is_plain_matmul(op: Op) -> bool:
    """Whether a MatMul is of two activations with equal leading sizes."""
    a, b = op.required(0), op.required(1)
    return (
        not a.constant
        and not b.constant
        and len(a.shape) == len(b.shape) >= 2
        and a.shape[:-2] == b.shape[:-2]
    )


def rounding_attrs(op: Op) -> dict[str, Attr] | None:
    """``x_format``, ``x_group`` and ``x_scale`` of a product; None where it leaves its x alone."""
    x_format = str(op.attrs.get("x_format", ""))
    if not x_format:
        return None
    return {
        "x_format": x_format,
        "x_group": int(op.attrs.get("x_group", 0)),
        "x_scale": float(op.attrs.get("x_scale", 0.0)),
    }


def head_attrs(op: Op, names: tuple[str, ...]) -> dict[str, Attr]:
    """Attributes of rotation and cache by name: sizes as int, flags as bool."""
    return {name: bool(op.attrs[name]) if name in _FLAGS else int(op.attrs[name]) for name in names}
