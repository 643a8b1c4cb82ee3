"""Rows by index: token and position embeddings, rows that want logits, Gather over the first axis."""

from __future__ import annotations

import math

from ..launch import Grid, KernelLaunch, Param, TritonKernel, row_stride, value, weight
from ..reading import is_lookup
from ..tactic import Call, Context, Lowering, Op, Operand, Tactic, WeightUse, bandwidth_cost
from .kernels.rows import gather_rows
from .reference_ops import embedding as embedding_reference
from .reference_ops import gather as gather_reference
from .reference_ops import gather_rows as gather_rows_reference
from .types import blocks_for_each, next_power_of_two, pointer

_BLOCK = 1024


def _launch(
    table: tuple[str, Param],
    stride: Param,
    indices: Operand,
    y: Operand,
    width: int,
    scale: float = 1.0,
    offset: int = 0,
) -> KernelLaunch:
    arguments: dict[str, tuple[str, Param]] = {
        "table": table,
        "indices": ("*i32", value(indices.name)),
        "y": (pointer(y.dtype), value(y.name)),
        "table_stride": ("i32", stride),
        "scale": ("fp32", Param("f32", scale)),
    }
    block = min(_BLOCK, next_power_of_two(width))
    kernel = TritonKernel(
        gather_rows,
        {name: kind for name, (kind, _) in arguments.items()},
        {"WIDTH": width, "INDEX_OFFSET": offset, "BLOCK": block},
        num_warps=max(1, block // 256),
        num_stages=1,
    )
    grid = (blocks_for_each(indices.shape), Grid(times=-(-width // block)))
    return KernelLaunch(kernel, grid, tuple(param for _, param in arguments.values()))


def _embedding_fits(op: Op, context: Context) -> bool:
    return is_lookup(op)


def _embedding(op: Op, context: Context) -> Lowering:
    ids, table, y = op.required(0), op.required(1), op.outputs[0]
    # Numbers that the graph holds (position tables) stay float32; the checkpoint's follow the build dtype.
    inlined = table.values is not None
    width = int(table.shape[1])
    launch = _launch(
        (pointer("f32" if inlined else context.half), weight(0)),
        Param("i32", width),
        ids,
        y,
        width,
        float(op.attrs.get("scale", 1.0)),
        int(op.attrs.get("index_offset", 0)),
    )
    use = WeightUse((table.name,), "vector" if inlined else "table")
    return Lowering((Call("embedding", [ids.name], [y.name], [use], {}, (launch,)),))


def _gather_rows_fits(op: Op, context: Context) -> bool:
    x = op.required(0)
    return len(x.shape) == 2 and isinstance(x.shape[1], int)


def _gather_rows(op: Op, context: Context) -> Lowering:
    x, rows, y = op.required(0), op.required(1), op.outputs[0]
    width = int(x.shape[1])
    launch = _launch((pointer(x.dtype), value(x.name)), row_stride(x.name), rows, y, width)
    call = Call("gather_rows", [x.name, rows.name], [y.name], (), {}, (launch,), takes_views=True)
    return Lowering((call,))


def _gather_fits(op: Op, context: Context) -> bool:
    x, indices = op.required(0), op.required(1)
    return (
        int(op.attrs.get("axis", 0)) == 0
        and x.dtype != "i32"
        and indices.dtype == "i32"
        and not indices.constant
        and all(isinstance(dim, int) for dim in x.shape[1:])
        and sum(isinstance(dim, str) for dim in indices.shape) <= 1
    )


def _gather(op: Op, context: Context) -> Lowering:
    x, indices, y = op.required(0), op.required(1), op.outputs[0]
    width = math.prod(int(dim) for dim in x.shape[1:])
    if x.constant:
        launch = _launch(("*fp32", weight(0)), Param("i32", width), indices, y, width)
        use = WeightUse((x.name,), "vector")
        return Lowering((Call("gather", [indices.name], [y.name], [use], {}, (launch,)),))
    launch = _launch((pointer(x.dtype), value(x.name)), Param("i32", width), indices, y, width)
    return Lowering((Call("gather", [x.name, indices.name], [y.name], (), {}, (launch,)),))


TACTICS = (
    Tactic(
        "cuda.embedding",
        "castiron.Embedding",
        "cuda",
        _embedding_fits,
        _embedding,
        bandwidth_cost,
        embedding_reference,
    ),
    Tactic(
        "cuda.gather_rows",
        "castiron.GatherRows",
        "cuda",
        _gather_rows_fits,
        _gather_rows,
        bandwidth_cost,
        gather_rows_reference,
    ),
    Tactic("cuda.gather", "Gather", "cuda", _gather_fits, _gather, bandwidth_cost, gather_reference),
)
