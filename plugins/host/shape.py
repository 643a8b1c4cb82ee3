"""Data movement: column views, reshapes without a copy, and the copies that remain."""

from __future__ import annotations

from ..reading import first_column, slice_bounds
from ..tactic import COPY, Call, Context, Lowering, Op, Operand, Tactic, View, bandwidth_cost
from .kernels import host_call


def _same_bytes(op: Op, context: Context) -> Lowering:
    return Lowering((View(op.outputs[0].name, op.required(0).name, op.outputs[0].shape),))


def _any(op: Op, context: Context) -> bool:
    return not op.required(0).constant


def _transpose(op: Op, context: Context) -> Lowering:
    rank = len(op.required(0).shape)
    perm = [int(p) for p in op.attrs.get("perm", range(rank)[::-1])]
    return Lowering(
        (host_call("transpose", [op.required(0).name], [op.outputs[0].name], (), {"perm": perm}),)
    )


def _slice(op: Op, context: Context) -> Lowering:
    x, y = op.required(0), op.outputs[0]
    bounds = slice_bounds(op)
    assert bounds is not None
    column = first_column(x.shape, bounds)
    if column is not None:
        return Lowering((View(y.name, x.name, y.shape, column),))
    actions: list[Call | View] = []
    temporaries: list[Operand] = []
    source, shape = x.name, list(x.shape)
    for axis, start, step in bounds:
        shape[axis] = y.shape[axis]
        last = (axis, start, step) == bounds[-1]
        target = y.name if last else f"{y.name}.axis{axis}"
        if not last:
            temporaries.append(Operand(target, tuple(shape)))
        actions.append(
            host_call("slice", [source], [target], (), {"axis": axis, "start": start, "step": step})
        )
        source = target
    return Lowering(tuple(actions), tuple(temporaries))


def _split(op: Op, context: Context) -> Lowering:
    x = op.required(0)
    axis = int(op.attrs.get("axis", 0)) % len(x.shape)
    start = 0
    actions: list[Call | View] = []
    for output in op.outputs:
        if axis == 1 and len(x.shape) == 2:
            actions.append(View(output.name, x.name, output.shape, start))
        else:
            actions.append(
                host_call("slice", [x.name], [output.name], (), {"axis": axis, "start": start, "step": 1})
            )
        start += int(output.shape[axis])
    return Lowering(tuple(actions))


def _split_fits(op: Op, context: Context) -> bool:
    axis = int(op.attrs.get("axis", 0)) % len(op.required(0).shape)
    return _any(op, context) and all(isinstance(o.shape[axis], int) for o in op.outputs)


def _concat(op: Op, context: Context) -> Lowering:
    axis = int(op.attrs["axis"]) % len(op.outputs[0].shape)
    inputs = [o.name for o in op.inputs if o is not None]
    return Lowering((host_call("concat", inputs, [op.outputs[0].name], (), {"axis": axis}),))


def _concat_fits(op: Op, context: Context) -> bool:
    return all(o is not None and not o.constant for o in op.inputs)


def _copy(op: Op, context: Context) -> Lowering:
    return Lowering((host_call("copy", [op.required(0).name], [op.outputs[0].name]),))


TACTICS = (
    Tactic("host.copy", COPY, "host", _any, _copy, bandwidth_cost),
    Tactic("host.reshape", "Reshape", "host", _any, _same_bytes, lambda op, context, tokens: 0.0),
    Tactic("host.identity", "Identity", "host", _any, _same_bytes, lambda op, context, tokens: 0.0),
    Tactic("host.transpose", "Transpose", "host", _any, _transpose, bandwidth_cost),
    Tactic(
        "host.slice",
        "Slice",
        "host",
        lambda op, context: slice_bounds(op) is not None,
        _slice,
        bandwidth_cost,
    ),
    Tactic("host.split", "Split", "host", _split_fits, _split, bandwidth_cost),
    Tactic("host.concat", "Concat", "host", _concat_fits, _concat, bandwidth_cost),
)
