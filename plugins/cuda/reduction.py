"""Softmax and reductions over the last axis, and the product of two activations."""

from __future__ import annotations

from ..launch import KernelLaunch, TritonKernel, value
from ..reading import REDUCE, is_plain_matmul, reduces_last_axis
from ..tactic import Call, Context, Lowering, Op, Tactic, bandwidth_cost, element_count
from . import reference_ops as reference
from .kernels import generic
from .strides import describable, sizes_of, symbol_count, symbol_of
from .types import blocks_for_each, blocks_over, next_power_of_two, pointer

_LONGEST_BLOCK = 4096
_MATMUL_TILE = 32


def _over_last_axis(op: Op, context: Context) -> bool:
    x = op.required(0)
    return x.dtype != "i32" and not x.constant and describable(x.shape) and reduces_last_axis(op)


def _launch(op: Op, function: object, constants: dict[str, object]) -> KernelLaunch:
    """A block for each row of the input."""
    x, y = op.required(0), op.outputs[0]
    (width,) = sizes_of(x.shape[-1:])
    block = min(_LONGEST_BLOCK, next_power_of_two(width) if width > 0 else _LONGEST_BLOCK)
    kernel = TritonKernel(
        function,
        {"x": pointer(x.dtype), "y": pointer(y.dtype), "n": "i32"},
        {"WIDTH": width, "BLOCK": block, **constants},
        num_warps=max(1, min(8, block // 256)),
        num_stages=1,
    )
    args = (value(x.name), value(y.name), symbol_count(symbol_of(x.shape)))
    return KernelLaunch(kernel, (blocks_for_each(x.shape[:-1]),), args)


def _softmax(op: Op, context: Context) -> Lowering:
    launch = _launch(op, generic.softmax, {})
    return Lowering((Call("softmax", [op.required(0).name], [op.outputs[0].name], (), {}, (launch,)),))


def _reduce(kind: str, fn: str) -> Tactic:
    def lower(op: Op, context: Context) -> Lowering:
        launch = _launch(op, generic.reduce, {"FN": fn})
        names = [op.required(0).name], [op.outputs[0].name]
        return Lowering((Call("reduce", *names, (), {"fn": fn}, (launch,)),))

    def accepts(op: Op, context: Context) -> bool:
        return op.input(1) is not None and _over_last_axis(op, context)

    return Tactic(f"cuda.reduce_{fn}", kind, "cuda", accepts, lower, bandwidth_cost, reference.reducing(fn))


def _matmul_fits(op: Op, context: Context) -> bool:
    return is_plain_matmul(op) and describable(op.required(0).shape, op.required(1).shape)


def _matmul(op: Op, context: Context) -> Lowering:
    a, b, y = op.required(0), op.required(1), op.outputs[0]
    m, k, n = (sizes_of(dims)[0] for dims in (a.shape[-2:-1], a.shape[-1:], b.shape[-1:]))
    kernel = TritonKernel(
        generic.matmul,
        {"a": pointer(a.dtype), "b": pointer(b.dtype), "y": pointer(y.dtype), "n": "i32"},
        {"M": m, "N": n, "K": k, "BLOCK": _MATMUL_TILE},
        num_stages=2,
    )
    grid = (
        blocks_for_each(a.shape[:-2]),
        blocks_over(y.shape[-2], _MATMUL_TILE),
        blocks_over(y.shape[-1], _MATMUL_TILE),
    )
    args = (value(a.name), value(b.name), value(y.name), symbol_count(symbol_of(a.shape, b.shape)))
    launch = KernelLaunch(kernel, grid, args)
    return Lowering((Call("matmul", [a.name, b.name], [y.name], (), {}, (launch,)),))


def _matmul_cost(op: Op, context: Context, tokens: int) -> float:
    columns = element_count(op.outputs[0].shape[-1:], tokens)
    return 2.0 * element_count(op.required(0).shape, tokens) * columns / (0.02 * context.target.matrix_flops)


TACTICS = (
    Tactic("cuda.softmax", "Softmax", "cuda", _over_last_axis, _softmax, bandwidth_cost, reference.softmax),
    *(_reduce(kind, fn) for kind, fn in REDUCE.items()),
    Tactic("cuda.matmul", "MatMul", "cuda", _matmul_fits, _matmul, _matmul_cost, reference.matmul),
)
