# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Products whose matrix each row picks (experts.py), with weights held as codes (quantized_sums.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from .experts import finish, pairs_of_tile, tile_of_pair, tiles_before
from .linear import tile_of
from .quantized_sums import quantized_stream_sums, quantized_tile_sums, scaled_sums


@triton.jit
def quantized_expert_stream(
    x,
    x_scales,
    codes,
    scales,
    row_scales,
    offsets,
    bias,
    x_stride,
    x_scale,
    ids,
    y,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    MATH: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    X_SCALES: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HALF: tl.constexpr,
    EXPERTS: tl.constexpr,
    PICKS: tl.constexpr,
    SHARED_X: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Few tokens: blocks and tiles as in expert_stream."""
    CODING: tl.constexpr = (K, GROUP, X_GROUP, MATH, FORMAT, SCALES, X_SCALES, HAS_OFFSETS, HALF)
    pairs = tokens * PICKS
    expert, same, rank = tile_of_pair(ids, pairs, tl.program_id(1), BLOCK_PAIRS)
    if (rank % BLOCK_M != 0) | (expert < 0) | (expert >= EXPERTS):
        return
    pair = pairs_of_tile(same, rank, pairs, BLOCK_PAIRS, BLOCK_M)[None, :]
    x_row = pair // PICKS if SHARED_X else pair
    inside = pair < pairs
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)[:, None]
    first_row = expert.to(tl.int64) * N + first
    read = (x, x_scales, codes, scales, offsets, row_scales, x_scale)
    acc, up = quantized_stream_sums(
        *(read, x_row[None], inside[None], first_row, (n < N)[None], x_stride, EXPERTS * N),
        *(N % BLOCK_N != 0, CODING, BLOCK_M, BLOCK_N, BLOCK_K, WARPS, GATED),
    )
    w_row = expert.to(tl.int64) * N + n
    acc, up = scaled_sums(acc, up, read, x_row, inside, w_row, n < N, EXPERTS * N, CODING, GATED)
    FORM: tl.constexpr = (GATED, ACTIVATION, HAS_BIAS, EXPERTS)
    finish(acc, up, pair, n, expert, pairs, bias, y, N, FORM)


@triton.jit
def quantized_expert_tile(
    x,
    x_scales,
    codes,
    scales,
    row_scales,
    offsets,
    bias,
    x_stride,
    x_scale,
    order,
    tile_experts,
    y,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    MATH: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    X_SCALES: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HALF: tl.constexpr,
    EXPERTS: tl.constexpr,
    PICKS: tl.constexpr,
    SHARED_X: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One output tile a block, of the rows that expert_order has put together; weights come first."""
    CODING: tl.constexpr = (K, GROUP, X_GROUP, MATH, FORMAT, SCALES, X_SCALES, HAS_OFFSETS, HALF)
    pairs = tokens * PICKS
    tiles = tiles_before(pairs, EXPERTS, BLOCK_M)
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0)
    if block >= tiles * TILES_N:
        return
    tile_m, tile_n = tile_of(block, tiles, TILES_N, GROUP_M)
    expert = tl.load(tile_experts + tile_m)
    if expert < 0:
        return
    pair = tl.load(order + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    x_row = pair // PICKS if SHARED_X else pair
    inside = pair < pairs
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    w_row = expert.to(tl.int64) * N + n
    read = (x, x_scales, codes, scales, offsets, row_scales, x_scale)
    acc, up = quantized_tile_sums(
        *(read, x_row.to(tl.int64), inside, w_row, n < N, x_stride, 0, EXPERTS * N, N % BLOCK_N != 0),
        *(tl.cdiv(K, BLOCK_K), K % BLOCK_K != 0, CODING, BLOCK_M, BLOCK_N, BLOCK_K, GATED),
    )
    acc, up = scaled_sums(acc, up, read, x_row, inside, w_row, n < N, EXPERTS * N, CODING, GATED)
    FORM: tl.constexpr = (GATED, ACTIVATION, HAS_BIAS, EXPERTS)
    finish(acc, up, pair, n, expert, pairs, bias, y, N, FORM)
