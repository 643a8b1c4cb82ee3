# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Flash attention of tiles of queries over the paged cache (Dao et al., FlashAttention-2, 2023)."""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_math import LOG2E, attention_scores, cache_blocks, first_visible, online_softmax, product
from .codes import decoded


@triton.jit
def _attend(
    state,
    queries,
    positions,
    slopes,
    k_scale,
    k_cache,
    v_cache,
    table,
    start,
    stop,
    end,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_V_DIM: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    FACTOR: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
    CACHE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the keys [start, stop) in tiles; ``state`` is (sums, mass, peak)."""
    sums, mass, peak = state
    dims = tl.arange(0, PADDED_DIM)
    v_dims = tl.arange(0, PADDED_V_DIM)
    lane = tl.arange(0, BLOCK_N)
    # Read a tile ahead: what waits for an address must not wait for the table too.
    blocks = cache_blocks(table, start, stop, BLOCK_N)
    for first in tl.range(start, stop, BLOCK_N):
        keys = first + lane
        inside = keys < end
        block = blocks.to(tl.int64) * BLOCK_STRIDE
        blocks = cache_blocks(table, first + BLOCK_N, stop, BLOCK_N)
        k_at = k_cache + (block + (keys % 32) * HEAD_DIM)[:, None] + dims[None, :]
        v_at = v_cache + (block + (keys % 32) * V_HEAD_DIM)[:, None] + v_dims[None, :]
        if PADDED_DIM == HEAD_DIM:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=dims[None, :] < HEAD_DIM, other=0.0)
        if CACHE != "":
            k = decoded(k, CACHE, queries.dtype)
        scores = product(queries, tl.trans(k), tl.zeros([queries.shape[0], BLOCK_N], tl.float32), EXACT)
        if CACHE != "":
            scores = scores * k_scale
        scores = attention_scores(
            scores, positions[:, None], keys[None, :], slopes, SCALE, SOFTCAP, WINDOW, CHUNK, MASKED
        )
        weights, peak, decay = online_softmax(scores, peak, FACTOR, MASKED)
        mass = mass * decay + tl.sum(weights, 1)
        # Where no key was ever stored memory may hold NaN, which a weight of 0 would not silence.
        if MASKED:
            v = tl.load(v_at, mask=inside[:, None] & (v_dims[None, :] < V_HEAD_DIM), other=0.0)
        elif PADDED_V_DIM == V_HEAD_DIM:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=v_dims[None, :] < V_HEAD_DIM, other=0.0)
        if CACHE != "":
            v = decoded(v, CACHE, queries.dtype)
        sums = product(weights.to(v.dtype), v, sums * decay[:, None], EXACT)
    return sums, mass, peak


@triton.jit
def attention_prefill(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    sinks,
    slopes,
    out,
    query_start,
    kv_len,
    block_table,
    tile_seq,
    tile_row,
    q_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_V_DIM: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
    CACHE: tl.constexpr,
    HALF: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """One program: BLOCK_M query rows of one sequence and head, over all keys that they see.

    Grid (heads, tiles, parts of a tile). Heads come first so that those of one KV head run side by side and
    find its keys in the L2 cache; the last tiles, which have most keys, start first.

    CACHE "int8" or "fp8": keys and values are codes of numbers over scales f32 [KV_HEADS]; they meet queries
    and weights in HALF, in which they are exact.
    """
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = tl.load(tile_seq + tile)
    if seq < 0:
        return
    start = tl.load(query_start + seq)
    rows = tl.load(query_start + seq + 1) - start
    length = tl.load(kv_len + seq)
    first_row = tl.load(tile_row + tile) + tl.program_id(2) * BLOCK_M
    if first_row >= rows:
        return

    head = tl.program_id(0)
    kv_head = head // (Q_HEADS // KV_HEADS)
    row = first_row + tl.arange(0, BLOCK_M)
    exists = row < rows
    token = (start + row).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    v_dims = tl.arange(0, PADDED_V_DIM)
    q_at = q + token[:, None] * q_stride + head * HEAD_DIM + dims[None, :]
    queries = tl.load(q_at, mask=exists[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    k_scale = 1.0
    if CACHE == "":
        queries = queries.to(k_cache.dtype.element_ty)
    else:
        queries = queries.to(tl.bfloat16 if HALF == "bf16" else tl.float16)
        k_scale = tl.load(k_scales + kv_head)

    first_position = length - rows + first_row
    positions = length - rows + row
    end = tl.minimum(length, first_position + BLOCK_M)
    table = block_table + seq.to(tl.int64) * TABLE_WIDTH
    k_head = k_cache + kv_head * (32 * HEAD_DIM)
    v_head = v_cache + kv_head * (32 * V_HEAD_DIM)

    head_slope = None
    if HAS_SLOPES:
        head_slope = tl.load(slopes + head)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # A sink is a key without a value.
        peak = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head) * LOG2E
        mass += 1.0
    sums = tl.zeros([BLOCK_M, PADDED_V_DIM], tl.float32)
    FACTOR: tl.constexpr = 1.0 if SOFTCAP > 0 or HAS_SLOPES else SCALE * LOG2E

    begin = first_visible(first_position, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    middle = begin
    state = (sums, mass, peak)
    if WINDOW == 0 and CHUNK == 0:
        # Tiles of keys that every row sees need no mask.
        middle = tl.minimum(first_position + 1, end) // BLOCK_N * BLOCK_N
        state = _attend(
            state, queries, positions, head_slope, k_scale, k_head, v_head, table, begin, middle, end,
            HEAD_DIM, V_HEAD_DIM, PADDED_DIM, PADDED_V_DIM, BLOCK_STRIDE, BLOCK_N,
            SCALE, FACTOR, SOFTCAP, WINDOW, CHUNK, EXACT, CACHE, False,
        )  # fmt: skip
    state = _attend(
        state, queries, positions, head_slope, k_scale, k_head, v_head, table, middle, end, end,
        HEAD_DIM, V_HEAD_DIM, PADDED_DIM, PADDED_V_DIM, BLOCK_STRIDE, BLOCK_N,
        SCALE, FACTOR, SOFTCAP, WINDOW, CHUNK, EXACT, CACHE, True,
    )  # fmt: skip
    sums, mass, peak = state
    if CACHE != "":
        mass = mass / tl.load(v_scales + kv_head)
    result = (sums / mass[:, None]).to(out.dtype.element_ty)
    out_at = out + token[:, None] * (Q_HEADS * V_HEAD_DIM) + head * V_HEAD_DIM + v_dims[None, :]
    tl.store(out_at, result, mask=exists[:, None] & (v_dims[None, :] < V_HEAD_DIM))
