"""Products whose matrix each row picks: ``w`` [EXPERTS · N, K], if GATED behind it as many rows of up.

A *pair* is a token and one of the PICKS experts that ``ids`` [T, PICKS] name for it. Its row of x is the
token's (SHARED_X) or its own, its result a row of y [T, PICKS, N]. Tiles hold pairs of one expert, and a
pair's sums depend on nothing but its row and its matrix. An id that names no expert gets no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import apply
from .linear import stream_sums, tile_of, tile_sums


@triton.jit
def tiles_before(pairs, experts, BLOCK_M: tl.constexpr):
    """A bound on the tiles of the first ``experts`` experts, who have ``pairs``: where the next ones' begin.

    Each expert's last tile may lack up to BLOCK_M - 1 rows. That is more than there are, so some tiles stay
    unused; in return every expert knows its place without the others' counts.
    """
    return (pairs + experts * (BLOCK_M - 1)) // BLOCK_M


@triton.jit
def expert_order(
    ids,
    order,
    tile_experts,
    tokens,
    PICKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Block e: the tiles of expert e, its pairs in ascending order in ``order`` [tiles, BLOCK_M].

    Behind a tile's last pair follow numbers beyond all pairs; ``tile_experts`` [tiles] is -1 for unused ones.
    """
    expert = tl.program_id(0)
    pairs = tokens * PICKS
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    mine = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, pairs, BLOCK):
        picked = tl.load(ids + first + lane, mask=first + lane < pairs, other=EXPERTS)
        before += (picked < expert).to(tl.int32)
        mine += (picked == expert).to(tl.int32)
    before = tl.sum(before)
    count = tl.sum(mine)
    tile = tiles_before(before, expert, BLOCK_M)
    used = tile + tl.cdiv(count, BLOCK_M)
    if expert == EXPERTS - 1:
        end = tiles_before(pairs, EXPERTS, BLOCK_M)
    else:
        end = tiles_before(before + count, expert + 1, BLOCK_M)
    for first in tl.range(tile, end, BLOCK_TILES):
        at = first + tl.arange(0, BLOCK_TILES)
        tl.store(tile_experts + at, tl.where(at < used, expert, -1), mask=at < end)
    placed = tile * BLOCK_M
    if count > 0:
        rank = (used - tile - 1) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(order + placed + rank, pairs + rank, mask=rank >= count)
        for first in tl.range(0, pairs, BLOCK):
            picked = tl.load(ids + first + lane, mask=first + lane < pairs, other=EXPERTS)
            match = (picked == expert).to(tl.int32)
            at = placed + tl.cumsum(match, axis=0) - 1
            tl.store(order + at, first + lane, mask=match > 0)
            placed += tl.sum(match)


@triton.jit
def tile_of_pair(ids, pairs, pair, BLOCK_PAIRS: tl.constexpr):
    """The expert of a pair, which of all pairs are of that expert, and how many of those lie before it."""
    expert = tl.load(ids + pair)
    other = tl.arange(0, BLOCK_PAIRS)
    same = (tl.load(ids + other, mask=other < pairs, other=-1) == expert).to(tl.int32)
    return expert, same, tl.sum(tl.where(other < pair, same, 0))


@triton.jit
def pairs_of_tile(same, rank, pairs, BLOCK_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The pair of each of BLOCK_M rows, from an expert's pair number ``rank`` on; ``pairs``: no row."""
    row = tl.cumsum(same, axis=0) - 1 - rank
    found = (same[None, :] > 0) & (row[None, :] == tl.arange(0, BLOCK_M)[:, None])
    other = tl.arange(0, BLOCK_PAIRS)[None, :]
    return pairs - tl.sum(tl.where(found, pairs - other, 0), axis=1)


@triton.jit
def finish(acc, up, pair, n, expert, pairs, bias, y, N: tl.constexpr, FORM: tl.constexpr):
    """Finish a tile with rows ``pair`` and columns ``n``; FORM: GATED, ACTIVATION, HAS_BIAS, EXPERTS."""
    if FORM[2]:
        own = bias + expert * N + n
        acc += tl.load(own, mask=n < N, other=0.0)
        if FORM[0]:
            up += tl.load(own + FORM[3] * N, mask=n < N, other=0.0)
    value = apply(acc, FORM[1])
    if FORM[0]:
        value = value * up
    inside = (pair < pairs) & (n < N)
    tl.store(y + pair.to(tl.int64) * N + n, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def expert_stream(
    x,
    w,
    bias,
    ids,
    y,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
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
    """Few tokens, whose pairs BLOCK_PAIRS covers: as linear_stream, block (j, p) for the tile of pair p.

    A tile belongs to its first pair. Blocks of the other pairs end at once: which ones they are each block
    finds for itself, without a launch that sorts.
    """
    pairs = tokens * PICKS
    expert, same, rank = tile_of_pair(ids, pairs, tl.program_id(1), BLOCK_PAIRS)
    if (rank % BLOCK_M != 0) | (expert < 0) | (expert >= EXPERTS):
        return
    pair = pairs_of_tile(same, rank, pairs, BLOCK_PAIRS, BLOCK_M)
    first = tl.program_id(0) * BLOCK_N
    part = tl.arange(0, WARPS)[:, None, None]
    n = tl.arange(0, BLOCK_N)[None, :, None]
    k_of_w = part * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    k_of_x = part * BLOCK_K + tl.arange(0, BLOCK_K)[None, :, None]
    w_tile = w + (expert.to(tl.int64) * N + first) * K + n * K + k_of_w
    x_row = pair // PICKS if SHARED_X else pair
    x_tile = x + x_row[None, None, :] * K + k_of_x
    acc, up = stream_sums(
        *(x_tile, w_tile, (pair < pairs)[None, None, :], first + n < N, k_of_x, k_of_w),
        *(EXPERTS * N * K, N % BLOCK_N != 0, K, BLOCK_M, BLOCK_N, BLOCK_K, WARPS, GATED),
    )
    n = first + tl.arange(0, BLOCK_N)[:, None]
    FORM: tl.constexpr = (GATED, ACTIVATION, HAS_BIAS, EXPERTS)
    finish(acc, up, pair[None, :], n, expert, pairs, bias, y, N, FORM)


@triton.jit
def expert_tile(
    x,
    w,
    bias,
    order,
    tile_experts,
    y,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
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
    """One output tile a block, of the rows that expert_order has put together."""
    pairs = tokens * PICKS
    tiles = tiles_before(pairs, EXPERTS, BLOCK_M)
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0)
    # The grid is of the most tokens that this launch may get.
    if block >= tiles * TILES_N:
        return
    tile_m, tile_n = tile_of(block, tiles, TILES_N, GROUP_M)
    expert = tl.load(tile_experts + tile_m)
    if expert < 0:
        return
    pair = tl.load(order + tile_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    x_row = pair // PICKS if SHARED_X else pair
    x_tile = x + x_row.to(tl.int64) * K + k
    w_tile = w + (expert.to(tl.int64) * N + n) * K + k
    acc, up = tile_sums(
        *(x_tile, w_tile, pair < pairs, n < N, k, 0, EXPERTS * N * K, N % BLOCK_N != 0),
        *(tl.cdiv(K, BLOCK_K), K % BLOCK_K != 0, K, BLOCK_M, BLOCK_N, BLOCK_K, GATED),
    )
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    FORM: tl.constexpr = (GATED, ACTIVATION, HAS_BIAS, EXPERTS)
    finish(acc, up, pair, n, expert, pairs, bias, y, N, FORM)
