"""Products, norms and lookups in numpy and float64: what the kernels are tested against.

Arguments are the op's operands in order, absent ones None; attributes come by keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...graph.numpy_ops import CURVES, erf

Array = np.ndarray[Any, Any]
_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    **CURVES,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "neg": lambda x: -x,
    "abs": np.abs,
    "reciprocal": lambda x: 1 / x,
    "softplus": lambda x: np.logaddexp(x, 0),
    "sin": np.sin,
    "cos": np.cos,
    "erf": erf,
    "square": lambda x: x * x,
}


def activate(x: Array, fn: str) -> Array:
    """The functions that docs/program.md lists for ``activation`` and ``unary``."""
    with np.errstate(all="ignore"):
        return np.asarray(_FUNCTIONS[fn](np.asarray(x, np.float64)))


def linear(
    x: Array,
    w: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    activation: str = "none",
    alpha: float = 1.0,
) -> tuple[Array]:
    """alpha · act(x · wᵀ + bias) + residual for x [R, K] and w [N, K]."""
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    if bias is not None:
        y = y + bias
    y = alpha * activate(y, activation)
    return (y if residual is None else y + residual,)


def gated_linear(
    x: Array,
    gate: Array,
    up: Array,
    gate_bias: Array | None = None,
    up_bias: Array | None = None,
    *,
    activation: str,
) -> tuple[Array]:
    """act(x · gateᵀ) · (x · upᵀ)."""
    return (linear(x, gate, gate_bias, activation=activation)[0] * linear(x, up, up_bias)[0],)


def rms_norm(x: Array, w: Array | None = None, *, eps: float, group: int = 0) -> tuple[Array]:
    """x / sqrt(mean(x²) + eps) · w over each run of ``group`` columns (0: the last axis)."""
    runs = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, group or x.shape[-1])
    y = runs / np.sqrt((runs**2).mean(-1, keepdims=True) + eps)
    return ((y if w is None else y * np.reshape(w, -1)).reshape(x.shape),)


def layer_norm(
    x: Array, w: Array | None = None, bias: Array | None = None, *, eps: float, group: int = 0
) -> tuple[Array]:
    """(x - mean) / sqrt(variance + eps) · w + bias over each run of ``group`` columns (0: the last axis)."""
    runs = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, group or x.shape[-1])
    runs = runs - runs.mean(-1, keepdims=True)
    y = runs / np.sqrt((runs**2).mean(-1, keepdims=True) + eps)
    y = y if w is None else y * np.reshape(w, -1)
    return ((y if bias is None else y + np.reshape(bias, -1)).reshape(x.shape),)


def add_rms_norm(x: Array, residual: Array, w: Array | None = None, *, eps: float) -> tuple[Array, Array]:
    """The norm of x + residual, and the sum."""
    total = np.asarray(x, np.float64) + residual
    return rms_norm(total, w, eps=eps)[0], total


def add_layer_norm(
    x: Array, residual: Array, w: Array | None = None, bias: Array | None = None, *, eps: float
) -> tuple[Array, Array]:
    """The norm of x + residual, and the sum."""
    total = np.asarray(x, np.float64) + residual
    return layer_norm(total, w, bias, eps=eps)[0], total


def embedding(ids: Array, table: Array, *, scale: float = 1.0, index_offset: int = 0) -> tuple[Array]:
    """Rows ``ids + index_offset`` of the table, scaled."""
    return (np.asarray(table, np.float64)[ids + index_offset] * scale,)


def gather_rows(x: Array, rows: Array) -> tuple[Array]:
    """Rows of x."""
    return (np.asarray(x)[rows],)


def gather(x: Array, indices: Array, *, axis: int = 0) -> tuple[Array]:
    """Slices of x along an axis (ONNX Gather)."""
    return (np.take(x, indices, axis=axis),)


def same(x: Array, *_: Array) -> tuple[Array]:
    """The numbers, whatever their shape."""
    return (np.asarray(x),)


def transpose(x: Array, *, perm: Sequence[int] | None = None) -> tuple[Array]:
    """Axes in another order."""
    return (np.transpose(x, perm),)


def cut(
    x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> tuple[Array]:
    """ONNX Slice."""
    index = [slice(None)] * x.ndim
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = at if axes is None else int(axes[at])
        index[axis] = slice(int(start), int(end), 1 if steps is None else int(steps[at]))
    return (x[tuple(index)],)


def concat(*parts: Array, axis: int) -> tuple[Array]:
    """Parts one after the other."""
    return (np.concatenate(parts, axis=axis),)


def expand(x: Array, shape: Array) -> tuple[Array]:
    """ONNX Expand: broadcast to a shape, in which 1 keeps a size of x."""
    return (np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(int(size) for size in shape))),)


def arithmetic(a: Array, b: Array, fn: str) -> tuple[Array]:
    """add, sub, mul, div, min, max or pow, with broadcasting."""
    functions = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "min": np.minimum,
        "max": np.maximum,
        "pow": np.power,
    }
    with np.errstate(all="ignore"):
        return (functions[fn](np.asarray(a, np.float64), np.asarray(b, np.float64)),)


def clipped(x: Array, low: Array | None = None, high: Array | None = None) -> tuple[Array]:
    """x within bounds, either of which may be absent."""
    x = x if low is None else np.maximum(x, low)
    return (x if high is None else np.minimum(x, high),)


def softmax(x: Array, *, axis: int = -1) -> tuple[Array]:
    """Exponentials over their sum."""
    weights = np.exp(np.asarray(x, np.float64) - np.max(x, axis=axis, keepdims=True))
    return (weights / weights.sum(axis=axis, keepdims=True),)


def reducing(fn: str) -> Callable[..., tuple[Array]]:
    """The reference of a reduction ("sum", "mean" or "max") over the last axis."""

    def reduce(x: Array, axes: Array | None = None, *, keepdims: int = 1, **_: Any) -> tuple[Array]:
        return (np.asarray(getattr(np, fn)(np.asarray(x, np.float64), axis=-1, keepdims=bool(keepdims))),)

    return reduce


def matmul(a: Array, b: Array) -> tuple[Array]:
    """Products of the last two axes."""
    return (np.asarray(a, np.float64) @ np.asarray(b, np.float64),)


def split(x: Array, sizes: Array | None = None, *, axis: int = 0, num_outputs: int = 1) -> tuple[Array, ...]:
    """ONNX Split: by sizes, or into parts of equal size, the last of which may be smaller."""
    if sizes is None:
        part = -(-x.shape[axis] // num_outputs)
        ends = [part * (index + 1) for index in range(num_outputs - 1)]
    else:
        ends = [int(end) for end in np.cumsum(sizes)[:-1]]
    return tuple(np.split(x, ends, axis=axis))
