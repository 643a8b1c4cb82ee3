"""Rotary embedding, with and without the store into the cache."""

from __future__ import annotations

from ..launch import Grid, KernelLaunch, TritonKernel, row_stride, step_input, value, weight
from ..reading import head_attrs
from ..tactic import Call, Context, Lowering, Op, Tactic, WeightUse, bandwidth_cost
from .kernels import rope as kernels
from .kv import CacheLayer, heads_per_program
from .reference_cache import paged_rope, rope_write_kv
from .types import next_power_of_two, pointer

#: Two warps for 1024 elements: each thread moves 16 bytes of either half of a head.
_NUM_WARPS = 2


def _pairs(op: Op) -> dict[str, int | bool]:
    head_dim, rotary = int(op.attrs["head_dim"]), int(op.attrs["rotary_dim"])
    return {
        "ROTARY_DIM": rotary,
        "INTERLEAVED": bool(op.attrs["interleaved"]),
        "CONCAT_HALVES": bool(op.attrs["concat_halves"]),
        "PADDED_HALF": next_power_of_two(rotary // 2),
        "PADDED_REST": next_power_of_two(max(1, head_dim - rotary)),
    }


def _tables(op: Op, first: int) -> tuple[WeightUse, WeightUse]:
    cos, sin = op.required(first), op.required(first + 1)
    return WeightUse((cos.name,), "vector"), WeightUse((sin.name,), "vector")


def _rope(op: Op, context: Context) -> Lowering:
    x, positions, y = op.required(0), op.required(1), op.outputs[0]
    heads, head_dim = int(op.attrs["heads"]), int(op.attrs["head_dim"])
    pairs = _pairs(op)
    per_program = heads_per_program(heads, head_dim)
    kernel = TritonKernel(
        kernels.rope,
        {
            "x": pointer(x.dtype),
            "positions": "*i32",
            "cos": "*fp32",
            "sin": "*fp32",
            "y": pointer(y.dtype),
            "x_stride": "i32",
        },
        {"HEADS": heads, "HEADS_PER_PROGRAM": per_program, "HEAD_DIM": head_dim, **pairs},
        num_warps=_NUM_WARPS,
    )
    args = (
        value(x.name),
        value(positions.name),
        weight(0),
        weight(1),
        value(y.name),
        row_stride(x.name),
    )
    launch = KernelLaunch(kernel, (Grid("T"), Grid(times=-(-heads // per_program))), args)
    # Columns that move, or change hands between threads, could be overwritten before they are read.
    moves = pairs["INTERLEAVED"]
    call = Call(
        "rope",
        [x.name, positions.name],
        [y.name],
        _tables(op, 2),
        head_attrs(op, ("heads", "head_dim", "rotary_dim", "interleaved", "concat_halves")),
        (launch,),
        takes_views=True,
        in_place=() if moves else ((0, 0),),
    )
    return Lowering((call,))


def _rope_write_kv(op: Op, context: Context) -> Lowering:
    q, k, v, positions = (op.required(i) for i in range(4))
    y = op.outputs[0]
    cache = CacheLayer.of(op, context)
    q_heads = int(op.attrs["q_heads"])
    per_program = heads_per_program(cache.kv_heads, cache.head_dim)
    kernel = TritonKernel(
        kernels.rope_write_kv,
        {
            "q": pointer(q.dtype),
            "k": pointer(k.dtype),
            "v": pointer(v.dtype),
            "positions": "*i32",
            "cos": "*fp32",
            "sin": "*fp32",
            "y": pointer(y.dtype),
            **cache.types,
            "slots": "*i32",
            "q_stride": "i32",
            "k_stride": "i32",
            "v_stride": "i32",
        },
        {
            "Q_HEADS": q_heads,
            "KV_HEADS": cache.kv_heads,
            "HEADS_PER_PROGRAM": per_program,
            "HEAD_DIM": cache.head_dim,
            "V_HEAD_DIM": cache.v_head_dim,
            "BLOCK_STRIDE": cache.block_stride,
            **_pairs(op),
            "PADDED_V_DIM": next_power_of_two(cache.v_head_dim),
            "FORMAT": cache.format,
        },
        num_warps=_NUM_WARPS,
    )
    args = (
        value(q.name),
        value(k.name),
        value(v.name),
        value(positions.name),
        weight(0),
        weight(1),
        value(y.name),
        *cache.args(2),
        step_input(cache.slots),
        row_stride(q.name),
        row_stride(k.name),
        row_stride(v.name),
    )
    groups = -(-q_heads // per_program) + -(-cache.kv_heads // per_program)
    call = Call(
        "rope_write_kv",
        [q.name, k.name, v.name, positions.name],
        [y.name],
        (*_tables(op, 4), *cache.scales),
        head_attrs(
            op,
            (
                "layer",
                "q_heads",
                "kv_heads",
                "head_dim",
                "v_head_dim",
                "rotary_dim",
                "interleaved",
                "concat_halves",
            ),
        ),
        (KernelLaunch(kernel, (Grid("T"), Grid(times=groups)), args),),
        takes_views=True,
    )
    return Lowering((call,))


def _tables_are_constant(first: int, op: Op) -> bool:
    return len(op.required(0).shape) == 2 and op.required(first).constant and op.required(first + 1).constant


TACTICS = (
    Tactic(
        "cuda.rope",
        "castiron.PagedRope",
        "cuda",
        lambda op, _: _tables_are_constant(2, op),
        _rope,
        bandwidth_cost,
        paged_rope,
    ),
    Tactic(
        "cuda.rope_write_kv",
        "castiron.RopeWriteKV",
        "cuda",
        lambda op, _: _tables_are_constant(4, op),
        _rope_write_kv,
        bandwidth_cost,
        rope_write_kv,
    ),
)
