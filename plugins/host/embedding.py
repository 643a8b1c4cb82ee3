"""Rows of a table by token id or by position."""

from __future__ import annotations

from ..reading import is_lookup
from ..tactic import Context, Lowering, Op, Tactic, WeightUse, bandwidth_cost
from .kernels import host_call


def _embedding_fits(op: Op, context: Context) -> bool:
    return is_lookup(op)


def _embedding(op: Op, context: Context) -> Lowering:
    ids, table = op.required(0), op.required(1)
    attrs = {"scale": float(op.attrs.get("scale", 1.0)), "index_offset": int(op.attrs.get("index_offset", 0))}
    # Numbers that the graph holds (position tables) stay float32; the checkpoint's follow the build dtype.
    use = WeightUse((table.name,), "vector" if table.values is not None else "table")
    return Lowering((host_call("embedding", [ids.name], [op.outputs[0].name], [use], attrs),))


def _gather_fits(op: Op, context: Context) -> bool:
    x, indices = op.required(0), op.required(1)
    return (
        int(op.attrs.get("axis", 0)) == 0
        and x.dtype == "f32"
        and indices.dtype == "i32"
        and not indices.constant
    )


def _gather(op: Op, context: Context) -> Lowering:
    x, indices = op.required(0), op.required(1)
    attrs = {"axis": 0, "x_weight": x.constant}
    out = [op.outputs[0].name]
    if x.constant:
        return Lowering((host_call("gather", [indices.name], out, [WeightUse((x.name,), "vector")], attrs),))
    return Lowering((host_call("gather", [x.name, indices.name], out, (), attrs),))


TACTICS = (
    Tactic("host.embedding", "castiron.Embedding", "host", _embedding_fits, _embedding, bandwidth_cost),
    Tactic("host.gather", "Gather", "host", _gather_fits, _gather, bandwidth_cost),
)
