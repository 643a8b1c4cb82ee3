"""Element by element: activations, unary and binary functions, clip."""

from __future__ import annotations

from functools import partial

from ..launch import KernelLaunch, Param, TritonKernel, value, weight
from ..reading import BINARY, UNARY, clip_bounds, has_clip_bounds
from ..tactic import Call, Context, Lowering, Op, Operand, Tactic, WeightUse, bandwidth_cost
from .kernels import generic
from .reference_ops import activate, arithmetic, clipped
from .strides import (
    BLOCK,
    box,
    broadcast_strides,
    describable,
    is_wide,
    sizes_of,
    symbol_count,
    symbol_of,
    walk_grid,
)
from .types import pointer


def _float(*operands: Operand) -> bool:
    return all(operand.dtype != "i32" for operand in operands)


def _unary_fits(op: Op, context: Context) -> bool:
    x = op.required(0)
    return _float(x, op.outputs[0]) and not x.constant and describable(x.shape)


def _unary_call(
    op: Op, context: Context, fn: str, low: float = 0.0, high: float = 0.0, name: str = "unary"
) -> Lowering:
    x, y = op.required(0), op.outputs[0]
    total = box(sizes_of(x.shape)).total
    symbol = symbol_of(x.shape)
    kernel = TritonKernel(
        generic.unary,
        {"x": pointer(x.dtype), "y": pointer(y.dtype), "n": "i32", "low": "fp32", "high": "fp32"},
        {"TOTAL": total, "FN": fn, "BLOCK": BLOCK, "WIDE": is_wide(total, context)},
        num_stages=1,
    )
    args = (value(x.name), value(y.name), symbol_count(symbol), Param("f32", low), Param("f32", high))
    launch = KernelLaunch(kernel, (walk_grid(total, symbol),), args)
    call = Call(name, [x.name], [y.name], (), {"fn": fn}, (launch,), in_place=((0, 0),))
    return Lowering((call,))


def _unary(kind: str, fn: str) -> Tactic:
    return Tactic(
        f"cuda.{fn}",
        kind,
        "cuda",
        _unary_fits,
        lambda op, context: _unary_call(op, context, fn),
        bandwidth_cost,
        lambda x: (activate(x, fn),),
    )


def _activation(op: Op, context: Context) -> Lowering:
    return _unary_call(op, context, str(op.attrs["fn"]))


def _clip_fits(op: Op, context: Context) -> bool:
    return _unary_fits(op, context) and has_clip_bounds(op)


def _clip(op: Op, context: Context) -> Lowering:
    least, most = clip_bounds(op)
    return _unary_call(op, context, "clip", least, most, name="clip")


def _binary_fits(op: Op, context: Context) -> bool:
    a, b = op.required(0), op.required(1)
    constants = [operand for operand in (a, b) if operand.constant]
    return (
        _float(a, b)
        and len(constants) < 2
        # A weight's sizes are fixed.
        and not any(isinstance(dim, str) for operand in constants for dim in operand.shape)
        and describable(a.shape, b.shape, op.outputs[0].shape)
    )


def _binary(kind: str, fn: str) -> Tactic:
    def lower(op: Op, context: Context) -> Lowering:
        a, b, y = op.required(0), op.required(1), op.outputs[0]
        if fn == "pow" and b.constant and b.scalar == 2.0:
            return _unary_call(op, context, "square")
        walk = box(sizes_of(y.shape), *(broadcast_strides(o.shape, y.shape) for o in (a, b)))
        symbol = symbol_of(y.shape)
        types = {
            "a": "*fp32" if a.constant else pointer(a.dtype),
            "b": "*fp32" if b.constant else pointer(b.dtype),
            "y": pointer(y.dtype),
            "n": "i32",
        }
        constants = {
            "RANK": len(walk.sizes),
            "SIZES": walk.sizes,
            "A_STRIDES": walk.strides[0],
            "B_STRIDES": walk.strides[1],
            "TOTAL": walk.total,
            "FN": fn,
            "BLOCK": BLOCK,
            "WIDE": is_wide(walk.total, context),
        }
        kernel = TritonKernel(generic.binary, types, constants, num_stages=1)
        operands = [weight(0) if o.constant else value(o.name) for o in (a, b)]
        args = (*operands, value(y.name), symbol_count(symbol))
        launch = KernelLaunch(kernel, (walk_grid(walk.total, symbol),), args)
        inputs = [o.name for o in (a, b) if not o.constant]
        weights = [WeightUse((o.name,), "vector") for o in (a, b) if o.constant]
        # Sharing bytes asks for equal shapes, so each thread reads the element that it overwrites.
        in_place = tuple((0, index) for index in range(len(inputs)))
        call = Call("binary", inputs, [y.name], weights, {"fn": fn}, (launch,), in_place=in_place)
        return Lowering((call,))

    return Tactic(f"cuda.{fn}", kind, "cuda", _binary_fits, lower, bandwidth_cost, partial(arithmetic, fn=fn))


TACTICS = (
    Tactic(
        "cuda.activation",
        "castiron.Activation",
        "cuda",
        _unary_fits,
        _activation,
        bandwidth_cost,
        lambda x, *, fn: (activate(x, fn),),
    ),
    *(_unary(kind, fn) for kind, fn in UNARY.items()),
    *(_binary(kind, fn) for kind, fn in BINARY.items()),
    Tactic("cuda.clip", "Clip", "cuda", _clip_fits, _clip, bandwidth_cost, clipped),
)
