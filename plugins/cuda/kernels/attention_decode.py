# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Split-KV attention of sequences with one query row, and the reduction of its parts (Flash-Decoding)."""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_math import LOG2E, attention_scores, cache_blocks, first_visible, online_softmax, product
from .codes import decoded


@triton.jit
def split_keys(begin, length, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, MIN_KEYS: tl.constexpr):
    """Keys of one split of the keys [begin, length): by the sequence alone, never by its neighbours."""
    share = tl.cdiv(tl.cdiv(length - begin, SPLITS), BLOCK_N) * BLOCK_N
    return tl.maximum(share, MIN_KEYS)


@triton.jit
def attention_decode(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    slopes,
    partial_sums,
    partial_stats,
    query_start,
    kv_len,
    block_table,
    decode_seq,
    q_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_V_DIM: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
    CACHE: tl.constexpr,
    HALF: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """One program: all query heads of one KV head of one sequence, over every num_programs(2)-th split.

    How many programs share the splits changes with the batch; what a split holds does not. CACHE, HALF: as in
    attention_prefill.

    partial_sums: f32 [D, SPLITS, Q_HEADS, V_HEAD_DIM]; partial_stats: f32 [D, Q_HEADS, 2, SPLITS], the peak
    (in powers of two) and the mass of each split.
    """
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.load(decode_seq + index)
    if seq < 0:
        return
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    length = tl.load(kv_len + seq)
    begin = first_visible(length - 1, WINDOW, CHUNK) // 32 * 32
    keys_per_split = split_keys(begin, length, SPLITS, BLOCK_N, MIN_KEYS)
    splits = tl.cdiv(length - begin, keys_per_split)
    if tl.program_id(2) >= splits:
        return

    token = tl.load(query_start + seq).to(tl.int64)
    member = tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + member
    dims = tl.arange(0, PADDED_DIM)
    v_dims = tl.arange(0, PADDED_V_DIM)
    q_at = q + token * q_stride + head[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q_at, mask=(member < GROUP)[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    if CACHE == "":
        queries = queries.to(k_cache.dtype.element_ty)
    else:
        queries = queries.to(tl.bfloat16 if HALF == "bf16" else tl.float16)
        k_scale = tl.load(k_scales + kv_head)
        v_scale = tl.load(v_scales + kv_head)
    head_slopes = None
    if HAS_SLOPES:
        head_slopes = tl.load(slopes + head, mask=member < GROUP, other=0.0)[:, None]
    positions = tl.zeros([BLOCK_H, 1], tl.int32) + (length - 1)
    table = block_table + seq.to(tl.int64) * TABLE_WIDTH
    FACTOR: tl.constexpr = 1.0 if SOFTCAP > 0 or HAS_SLOPES else SCALE * LOG2E

    for split in range(tl.program_id(2), splits, tl.num_programs(2)):
        start = begin + split * keys_per_split
        stop = tl.minimum(start + keys_per_split, length)
        peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_H], tl.float32)
        sums = tl.zeros([BLOCK_H, PADDED_V_DIM], tl.float32)
        # Read a tile ahead: what waits for an address must not wait for the table too.
        blocks = cache_blocks(table, start, stop, BLOCK_N)
        for first in tl.range(start, stop, BLOCK_N):
            keys = first + tl.arange(0, BLOCK_N)
            inside = keys < stop
            block = blocks.to(tl.int64) * BLOCK_STRIDE
            blocks = cache_blocks(table, first + BLOCK_N, stop, BLOCK_N)
            k_row = k_cache + (block + (kv_head * 32 + keys % 32) * HEAD_DIM)
            v_row = v_cache + (block + (kv_head * 32 + keys % 32) * V_HEAD_DIM)
            # What lies behind the last key may be NaN, which a weight of 0 would not silence.
            k_mask = inside[:, None] & (dims[None, :] < HEAD_DIM)
            k = tl.load(k_row[:, None] + dims[None, :], mask=k_mask, other=0.0)
            if CACHE != "":
                k = decoded(k, CACHE, queries.dtype)
            scores = product(queries, tl.trans(k), tl.zeros([BLOCK_H, BLOCK_N], tl.float32), EXACT)
            if CACHE != "":
                scores = scores * k_scale
            scores = attention_scores(
                scores, positions, keys[None, :], head_slopes, SCALE, SOFTCAP, WINDOW, CHUNK, True
            )
            weights, peak, decay = online_softmax(scores, peak, FACTOR, True)
            mass = mass * decay + tl.sum(weights, 1)
            v_mask = inside[:, None] & (v_dims[None, :] < V_HEAD_DIM)
            v = tl.load(v_row[:, None] + v_dims[None, :], mask=v_mask, other=0.0)
            if CACHE != "":
                v = decoded(v, CACHE, queries.dtype)
            sums = product(weights.to(v.dtype), v, sums * decay[:, None], EXACT)
        if CACHE != "":
            sums = sums * v_scale
        row = (index.to(tl.int64) * SPLITS + split) * Q_HEADS + head
        sums_at = partial_sums + row[:, None] * V_HEAD_DIM + v_dims[None, :]
        tl.store(sums_at, sums, mask=(member < GROUP)[:, None] & (v_dims[None, :] < V_HEAD_DIM))
        stats_at = partial_stats + (index * Q_HEADS + head) * (2 * SPLITS) + split
        tl.store(stats_at, peak, mask=member < GROUP)
        tl.store(stats_at + SPLITS, mass, mask=member < GROUP)


@triton.jit
def attention_reduce(
    partial_sums,
    partial_stats,
    sinks,
    out,
    query_start,
    kv_len,
    decode_seq,
    Q_HEADS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PADDED_V_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program: the splits of one sequence and head, weighted by their peaks, into the output row."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.load(decode_seq + index)
    if seq < 0:
        return
    length = tl.load(kv_len + seq)
    begin = first_visible(length - 1, WINDOW, CHUNK) // 32 * 32
    splits = tl.cdiv(length - begin, split_keys(begin, length, SPLITS, BLOCK_N, MIN_KEYS))

    split = tl.arange(0, PADDED_SPLITS)
    used = split < splits
    stats_at = partial_stats + (index * Q_HEADS + head) * (2 * SPLITS) + split
    peaks = tl.load(stats_at, mask=used, other=float("-inf"))
    masses = tl.load(stats_at + SPLITS, mask=used, other=0.0)
    peak = tl.max(peaks, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(peaks - peak)
    total = tl.sum(weights * masses, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    v_dims = tl.arange(0, PADDED_V_DIM)
    valid = v_dims < V_HEAD_DIM
    row = (index.to(tl.int64) * SPLITS + split) * Q_HEADS + head
    sums_at = partial_sums + row[:, None] * V_HEAD_DIM + v_dims[None, :]
    sums = tl.load(sums_at, mask=used[:, None] & valid[None, :], other=0.0)
    result = tl.sum(sums * weights[:, None], 0) / total
    token = tl.load(query_start + seq).to(tl.int64)
    out_at = out + token * (Q_HEADS * V_HEAD_DIM) + head * V_HEAD_DIM + v_dims
    tl.store(out_at, result.to(out.dtype.element_ty), mask=valid)
