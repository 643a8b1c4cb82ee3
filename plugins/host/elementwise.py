"""Element by element: activations, unary and binary functions, clip; softmax and reductions; Expand."""

from __future__ import annotations

from typing import Any

from ..reading import BINARY, REDUCE, UNARY, clip_bounds, has_clip_bounds, reduces_last_axis
from ..tactic import Call, Context, Dims, Lowering, Op, Operand, Tactic, View, WeightUse, bandwidth_cost
from .kernels import host_call


def _activation(op: Op, context: Context) -> bool:
    return op.outputs[0].dtype == "f32" and not op.required(0).constant


def _lower_activation(op: Op, context: Context) -> Lowering:
    return _unary_call(op, str(op.attrs["fn"]))


def _unary_call(op: Op, fn: str) -> Lowering:
    return Lowering((host_call("unary", [op.required(0).name], [op.outputs[0].name], (), {"fn": fn}),))


def _unary(kind: str, fn: str) -> Tactic:
    return Tactic(
        f"host.{fn}", kind, "host", _activation, lambda op, context: _unary_call(op, fn), bandwidth_cost
    )


def _float_operands(op: Op, context: Context) -> bool:
    a, b = op.required(0), op.required(1)
    if a.dtype != "f32" or b.dtype != "f32" or (a.constant and b.constant):
        return False
    # The kernel broadcasts the second operand over the first, or both.
    return not any(isinstance(d, str) for c in (a, b) if c.constant for d in c.shape)


def _binary(kind: str, fn: str) -> Tactic:
    def lower(op: Op, context: Context) -> Lowering:
        a, b = op.required(0), op.required(1)
        reverse = a.constant
        if reverse:
            a, b = b, a
        out = op.outputs[0].name
        if fn == "pow" and not reverse and b.scalar == 2.0:
            return _unary_call(op, "square")
        # Addition and multiplication commute; the others say which operand comes first.
        attrs: dict[str, Any] = {
            "fn": fn,
            "b_weight": b.constant,
            "reverse": reverse and fn in ("sub", "div", "pow"),
        }
        if b.constant:
            return Lowering((host_call("binary", [a.name], [out], [WeightUse((b.name,), "vector")], attrs),))
        return Lowering((host_call("binary", [a.name, b.name], [out], (), attrs),))

    return Tactic(f"host.{fn}", kind, "host", _float_operands, lower, bandwidth_cost)


def _clip_fits(op: Op, context: Context) -> bool:
    return op.required(0).dtype == "f32" and has_clip_bounds(op)


def _clip(op: Op, context: Context) -> Lowering:
    least, most = clip_bounds(op)
    return Lowering(
        (host_call("clip", [op.required(0).name], [op.outputs[0].name], (), {"min": least, "max": most}),)
    )


def _over_last_axis(op: Op, context: Context) -> bool:
    return reduces_last_axis(op)


def _softmax(op: Op, context: Context) -> Lowering:
    return Lowering((host_call("softmax", [op.required(0).name], [op.outputs[0].name]),))


def _reduce(kind: str, fn: str) -> Tactic:
    def lower(op: Op, context: Context) -> Lowering:
        return Lowering((host_call("reduce", [op.required(0).name], [op.outputs[0].name], (), {"fn": fn}),))

    def accepts(op: Op, context: Context) -> bool:
        return op.input(1) is not None and _over_last_axis(op, context)

    return Tactic(f"host.{kind}", kind, "host", accepts, lower, bandwidth_cost)


def _expand_fits(op: Op, context: Context) -> bool:
    x, y = op.required(0), op.outputs[0]
    # A size that x has as one and y as a symbol cannot be given by a weight's shape.
    padded: Dims = (1,) * (len(y.shape) - len(x.shape)) + x.shape
    return x.dtype == "f32" and all(
        a == b or not isinstance(b, str) for a, b in zip(padded, y.shape, strict=True)
    )


def _expand(op: Op, context: Context) -> Lowering:
    """A broadcast is a concatenation of copies along each axis that grows."""
    x, y = op.required(0), op.outputs[0]
    shape: Dims = (1,) * (len(y.shape) - len(x.shape)) + x.shape
    name = f"{y.name}.expand"
    actions: list[Call | View] = [View(name, x.name, shape)]
    temporaries: list[Operand] = []
    growing = [axis for axis in range(len(shape)) if shape[axis] != y.shape[axis]]
    if not growing:
        return Lowering((View(y.name, x.name, shape),))
    for axis in growing:
        times = int(y.shape[axis])
        shape = (*shape[:axis], times, *shape[axis + 1 :])
        result = y.name if axis == growing[-1] else f"{name}.{axis}"
        if result != y.name:
            temporaries.append(Operand(result, shape))
        actions.append(host_call("concat", [name] * times, [result], (), {"axis": axis}))
        name = result
    return Lowering(tuple(actions), tuple(temporaries))


TACTICS = (
    Tactic("host.activation", "castiron.Activation", "host", _activation, _lower_activation, bandwidth_cost),
    *(_unary(kind, fn) for kind, fn in UNARY.items()),
    *(_binary(kind, fn) for kind, fn in BINARY.items()),
    Tactic("host.clip", "Clip", "host", _clip_fits, _clip, bandwidth_cost),
    Tactic("host.softmax", "Softmax", "host", _over_last_axis, _softmax, bandwidth_cost),
    *(_reduce(kind, fn) for kind, fn in REDUCE.items()),
    Tactic("host.expand", "Expand", "host", _expand_fits, _expand, bandwidth_cost),
)
