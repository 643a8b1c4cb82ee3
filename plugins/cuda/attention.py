"""Attention over the paged cache: query tiles of prefills, and split-KV for sequences with one row.

A step runs up to three launches: tiles (symbol P), splits and their reduction (symbol D). A launch whose
symbol is 0 is skipped. The sums of the splits lie in temporaries of
``max_batch_size * splits * q_heads * (v_head_dim + 2) * 4`` bytes, at most 64 MiB where one split allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...engines.program import ITEM_BYTES, StepInput
from ..launch import Grid, KernelLaunch, Param, TritonKernel, When, row_stride, step_input, value, weight
from ..tactic import Attr, Call, Context, Lowering, Op, Operand, Tactic, WeightUse, element_count
from .attention_tiles import DecodeTiles, PrefillTiles, decode_tiles, prefill_tiles
from .kernels import attention_decode, attention_prefill
from .kv import CacheLayer
from .reference_cache import paged_attention
from .types import next_power_of_two, pointer

_PARTIAL_BYTES = 64 << 20
#: Fewest keys of a split: below, starting a program costs more than reading them (64 KiB at 128 wide heads).
_MIN_KEYS = 128
_MOST_SPLITS = 64
#: With more sequences than fill the device this often, a program takes several splits.
_WAVES = 8


@dataclass(frozen=True)
class _Attention:
    """A PagedAttention op, unpacked."""

    q: Operand
    out: Operand
    sinks: Operand | None
    slopes: Operand | None
    cache: CacheLayer
    q_heads: int
    scale: float
    window: int
    chunk: int
    softcap: float
    table_width: int
    half: str

    @staticmethod
    def of(op: Op, context: Context) -> _Attention:
        return _Attention(
            q=op.required(0),
            out=op.outputs[0],
            sinks=op.input(1),
            slopes=op.input(2),
            cache=CacheLayer.of(op, context),
            q_heads=int(op.attrs["q_heads"]),
            scale=float(op.attrs["scale"]),
            window=int(op.attrs.get("window", 0)),
            chunk=int(op.attrs.get("chunk", 0)),
            softcap=float(op.attrs.get("softcap", 0.0)),
            table_width=-(-context.limits.max_seq_len // 32),
            half=context.half,
        )

    @property
    def mask(self) -> dict[str, Any]:
        return {"WINDOW": self.window, "CHUNK": self.chunk}

    @property
    def shape(self) -> dict[str, Any]:
        """Constants that both kernels over the cache take."""
        return {
            "Q_HEADS": self.q_heads,
            "KV_HEADS": self.cache.kv_heads,
            "HEAD_DIM": self.cache.head_dim,
            "V_HEAD_DIM": self.cache.v_head_dim,
            "PADDED_DIM": padded_width(self.cache.head_dim),
            "PADDED_V_DIM": padded_width(self.cache.v_head_dim),
            "BLOCK_STRIDE": self.cache.block_stride,
            "TABLE_WIDTH": self.table_width,
            "SCALE": self.scale,
            "SOFTCAP": self.softcap,
            **self.mask,
            "EXACT": self.cache.dtype == "f32",
            "CACHE": self.cache.format,
            "HALF": self.half,
        }

    @property
    def flags(self) -> dict[str, bool]:
        return {"HAS_SINKS": self.sinks is not None, "HAS_SLOPES": self.slopes is not None}

    @property
    def weights(self) -> list[WeightUse]:
        """Sinks and slopes, if there are any, then the cache's scales."""
        return [*self._given, *self.cache.scales]

    @property
    def _given(self) -> list[WeightUse]:
        return [WeightUse((w.name,), "vector") for w in (self.sinks, self.slopes) if w is not None]

    def cache_args(self) -> tuple[Param, ...]:
        """The cache's addresses and scales."""
        return self.cache.args(len(self._given))

    def sinks_arg(self) -> tuple[str, Param]:
        """Type and argument; an absent one is the address of q, which the kernel does not read."""
        return self._optional(self.sinks, 0)

    def slopes_arg(self) -> tuple[str, Param]:
        """As sinks_arg."""
        return self._optional(self.slopes, len(self._given) - 1)

    def _optional(self, operand: Operand | None, index: int) -> tuple[str, Param]:
        if operand is None:
            return pointer(self.q.dtype), value(self.q.name)
        return pointer("f32"), weight(index)


def padded_width(width: int) -> int:
    """Columns of a tile that holds ``width``: matrix units take no fewer than 16."""
    return max(16, next_power_of_two(width))


def _prefill(op: _Attention, tiles: PrefillTiles, tile_rows: int) -> KernelLaunch:
    sinks, slopes = op.sinks_arg(), op.slopes_arg()
    inputs: tuple[StepInput, ...] = ("query_start", "kv_len", op.cache.table, "tile_seq", "tile_row")
    names = ("query_start", "kv_len", "block_table", "tile_seq", "tile_row")
    kernel = TritonKernel(
        attention_prefill.attention_prefill,
        {
            "q": pointer(op.q.dtype),
            **op.cache.types,
            "sinks": sinks[0],
            "slopes": slopes[0],
            "out": pointer(op.out.dtype),
            **dict.fromkeys(names, "*i32"),
            "q_stride": "i32",
        },
        {**op.shape, **op.flags, "BLOCK_M": tiles.rows, "BLOCK_N": tiles.keys},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        hot=op.cache.dtype != "f32",
    )
    args = (
        value(op.q.name),
        *op.cache_args(),
        sinks[1],
        slopes[1],
        value(op.out.name),
        *(step_input(name) for name in inputs),
        row_stride(op.q.name),
    )
    return KernelLaunch(
        kernel, (Grid(times=op.q_heads), Grid("P"), Grid(times=tile_rows // tiles.rows)), args
    )


def split_count(context: Context, q_heads: int, kv_heads: int, v_head_dim: int) -> int:
    """Splits of a sequence's keys: enough for one sequence to occupy the device twice over.

    Bounded by the longest sequence, and by the memory of the partial sums.
    """
    wanted = -(-2 * context.target.multiprocessors // kv_heads)
    longest = -(-context.limits.max_seq_len // _MIN_KEYS)
    one_split = context.limits.max_batch_size * q_heads * (v_head_dim + 2) * 4
    return max(1, min(wanted, longest, _PARTIAL_BYTES // one_split, _MOST_SPLITS))


def _decode(
    op: _Attention, tiles: DecodeTiles, context: Context, sums: Operand, stats: Operand
) -> tuple[KernelLaunch, ...]:
    splits = split_count(context, op.q_heads, op.cache.kv_heads, op.cache.v_head_dim)
    slopes = op.slopes_arg()
    inputs: tuple[StepInput, ...] = ("query_start", "kv_len", op.cache.table, "decode_seq")
    names = ("query_start", "kv_len", "block_table", "decode_seq")
    splitting = {"BLOCK_N": tiles.keys, "SPLITS": splits, "MIN_KEYS": _MIN_KEYS}
    kernel = TritonKernel(
        attention_decode.attention_decode,
        {
            "q": pointer(op.q.dtype),
            **op.cache.types,
            "slopes": slopes[0],
            "partial_sums": "*fp32",
            "partial_stats": "*fp32",
            **dict.fromkeys(names, "*i32"),
            "q_stride": "i32",
        },
        {**op.shape, "HAS_SLOPES": op.slopes is not None, "BLOCK_H": tiles.heads, **splitting},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        hot=op.cache.dtype != "f32",
    )
    args = (
        value(op.q.name),
        *op.cache_args(),
        slopes[1],
        value(sums.name),
        value(stats.name),
        *(step_input(name) for name in inputs),
        row_stride(op.q.name),
    )
    # With many sequences most programs would find no keys for themselves: fewer then take several splits.
    few = max(1, _WAVES * context.target.multiprocessors // (op.cache.kv_heads * splits))
    grids = {When("D", 0, few): splits, When("D", few + 1): -(-splits // 8)}
    if splits == 1:
        grids = {When("D"): 1}
    splits_launches = tuple(
        KernelLaunch(kernel, (Grid("D"), Grid(times=op.cache.kv_heads), Grid(times=programs)), args, when)
        for when, programs in grids.items()
    )
    return (*splits_launches, _reduce(op, splitting, sums, stats))


def _reduce(op: _Attention, splitting: dict[str, int], sums: Operand, stats: Operand) -> KernelLaunch:
    sinks = op.sinks_arg()
    inputs: tuple[StepInput, ...] = ("query_start", "kv_len", "decode_seq")
    kernel = TritonKernel(
        attention_decode.attention_reduce,
        {
            "partial_sums": "*fp32",
            "partial_stats": "*fp32",
            "sinks": sinks[0],
            "out": pointer(op.out.dtype),
            **dict.fromkeys(inputs, "*i32"),
        },
        {
            "HAS_SINKS": op.sinks is not None,
            "Q_HEADS": op.q_heads,
            "V_HEAD_DIM": op.cache.v_head_dim,
            "PADDED_V_DIM": next_power_of_two(op.cache.v_head_dim),
            "PADDED_SPLITS": next_power_of_two(splitting["SPLITS"]),
            **splitting,
            **op.mask,
        },
    )
    args = (
        value(sums.name),
        value(stats.name),
        sinks[1],
        value(op.out.name),
        *(step_input(name) for name in inputs),
    )
    return KernelLaunch(kernel, (Grid("D"), Grid(times=op.q_heads)), args)


def _lower(op: Op, context: Context) -> Lowering:
    attention = _Attention.of(op, context)
    cache = attention.cache
    splits = split_count(context, attention.q_heads, cache.kv_heads, cache.v_head_dim)
    rows = splits * attention.q_heads
    sums = Operand(f"{attention.out.name}.sums", ("D", rows * cache.v_head_dim))
    stats = Operand(f"{attention.out.name}.stats", ("D", 2 * rows))
    item_bytes = ITEM_BYTES[cache.dtype]
    widths = padded_width(cache.head_dim), padded_width(cache.v_head_dim)
    prefill = prefill_tiles(context.target, *widths, item_bytes, context.prefill_tile)
    decode = decode_tiles(context.target, *widths, item_bytes, attention.q_heads // cache.kv_heads)
    launches = (
        _prefill(attention, prefill, context.prefill_tile),
        *_decode(attention, decode, context, sums, stats),
    )
    names = ("layer", "q_heads", "kv_heads", "head_dim", "v_head_dim")
    attrs: dict[str, Attr] = {name: int(op.attrs[name]) for name in names}
    attrs |= {
        "scale": attention.scale,
        "window": attention.window,
        "chunk": attention.chunk,
        "softcap": attention.softcap,
        "has_sinks": attention.sinks is not None,
        "has_slopes": attention.slopes is not None,
    }
    call = Call(
        "paged_attention",
        [attention.q.name],
        [attention.out.name, sums.name, stats.name],
        attention.weights,
        attrs,
        launches,
        takes_views=True,
    )
    return Lowering((call,), (sums, stats))


def _accepts(op: Op, context: Context) -> bool:
    constants = [op.input(i) for i in (1, 2)]
    return len(op.required(0).shape) == 2 and all(c is None or c.constant for c in constants)


def _cost(op: Op, context: Context, tokens: int) -> float:
    """Seconds: the larger of the products and the traffic for ``tokens`` rows of one sequence."""
    q_heads, kv_heads = int(op.attrs["q_heads"]), int(op.attrs["kv_heads"])
    widths = int(op.attrs["head_dim"]) + int(op.attrs["v_head_dim"])
    products = 2.0 * q_heads * widths * tokens * tokens / 2
    traffic = 2.0 * kv_heads * widths * tokens + 2.0 * element_count(op.outputs[0].shape, tokens)
    return max(products / context.target.matrix_flops, traffic / context.target.bandwidth)


TACTICS = (
    Tactic(
        "cuda.paged_attention",
        "castiron.PagedAttention",
        "cuda",
        _accepts,
        _lower,
        _cost,
        paged_attention,
    ),
)
