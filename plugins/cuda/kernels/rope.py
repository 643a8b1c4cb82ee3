# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Rotary embedding, alone or with the store of keys and values into the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl

from .kv import as_stored, cache_row, store_rows


@triton.jit
def rotate_heads(
    x_row,
    y_row,
    scales,
    cos,
    sin,
    position,
    heads,
    count,
    x_step: tl.constexpr,
    y_step: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONCAT_HALVES: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Rotate heads of one token: head h from ``x_row + h * x_step`` to ``y_row + h * y_step``.

    ``heads`` [G]: indices, those from ``count`` on are left out. Pairs (a, b) of columns become
    (a cos - b sin, b cos + a sin); columns from ROTARY_DIM on are copied. FORMAT, ``scales``: see as_stored.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    pair = tl.arange(0, PADDED_HALF)
    exists = (heads < count)[:, None]
    mask = exists & (pair < HALF)[None, :]
    # Neighbours are read and written side by side, 16 bytes at a time, and taken apart in registers.
    both = tl.arange(0, 2 * PADDED_HALF)
    both_mask = exists & (both < ROTARY_DIM)[None, :]
    x_head = x_row + heads[:, None] * x_step
    if INTERLEAVED:
        x = tl.load(x_head + both[None, :], mask=both_mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [heads.shape[0], PADDED_HALF, 2]))
    else:
        a = tl.load(x_head + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_head + HALF + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    angle = position.to(tl.int64) * HALF + pair
    c = tl.load(cos + angle, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=pair < HALF, other=0.0)[None, :]
    KIND: tl.constexpr = y_row.dtype.element_ty
    first = as_stored(a * c - b * s, scales, heads, count, KIND, FORMAT)
    second = as_stored(b * c + a * s, scales, heads, count, KIND, FORMAT)
    y_head = y_row + heads[:, None] * y_step
    if INTERLEAVED and not CONCAT_HALVES:
        y = tl.reshape(tl.join(first, second), [heads.shape[0], 2 * PADDED_HALF])
        tl.store(y_head + both[None, :], y, mask=both_mask)
    else:
        tl.store(y_head + pair[None, :], first, mask=mask)
        tl.store(y_head + HALF + pair[None, :], second, mask=mask)
    if ROTARY_DIM < HEAD_DIM:
        rest = ROTARY_DIM + tl.arange(0, PADDED_REST)
        mask = exists & (rest < HEAD_DIM)[None, :]
        passed = tl.load(x_head + rest[None, :], mask=mask, other=0.0)
        passed = as_stored(passed, scales, heads, count, KIND, FORMAT)
        tl.store(y_head + rest[None, :], passed, mask=mask)


@triton.jit
def rope(
    x,
    positions,
    cos,
    sin,
    y,
    x_stride,
    HEADS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONCAT_HALVES: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
):
    """Grid (T, groups of heads): one token's heads, [T, HEADS * HEAD_DIM] to the same shape."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    rotate_heads(
        x + token * x_stride, y + token * (HEADS * HEAD_DIM), cos, cos, sin, tl.load(positions + token),
        heads, HEADS, HEAD_DIM, HEAD_DIM,
        HEAD_DIM, ROTARY_DIM, INTERLEAVED, CONCAT_HALVES, PADDED_HALF, PADDED_REST, "",
    )  # fmt: skip


@triton.jit
def rope_write_kv(
    q,
    k,
    v,
    positions,
    cos,
    sin,
    y,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    slots,
    q_stride,
    k_stride,
    v_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONCAT_HALVES: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    PADDED_V_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Rotate queries to ``y`` [T, Q_HEADS * HEAD_DIM]; rotate keys and store them and values in the cache.

    FORMAT "int8" or "fp8": of the cache, which then holds numbers over scales f32 [KV_HEADS].
    Grid (T, groups of query heads, then groups of KV heads). Rows whose slot is -1 store nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions + token)
    member = tl.arange(0, HEADS_PER_PROGRAM)
    Q_GROUPS: tl.constexpr = (Q_HEADS + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    if group < Q_GROUPS:
        rotate_heads(
            q + token * q_stride, y + token * (Q_HEADS * HEAD_DIM), cos, cos, sin, position,
            group * HEADS_PER_PROGRAM + member, Q_HEADS, HEAD_DIM, HEAD_DIM,
            HEAD_DIM, ROTARY_DIM, INTERLEAVED, CONCAT_HALVES, PADDED_HALF, PADDED_REST, "",
        )  # fmt: skip
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            heads = (group - Q_GROUPS) * HEADS_PER_PROGRAM + member
            rotate_heads(
                k + token * k_stride, cache_row(k_cache, slot, BLOCK_STRIDE, HEAD_DIM), k_scales,
                cos, sin, position, heads, KV_HEADS, HEAD_DIM, 32 * HEAD_DIM,
                HEAD_DIM, ROTARY_DIM, INTERLEAVED, CONCAT_HALVES, PADDED_HALF, PADDED_REST, FORMAT,
            )  # fmt: skip
            v_row = cache_row(v_cache, slot, BLOCK_STRIDE, V_HEAD_DIM)
            store_rows(
                v + token * v_stride, v_row, v_scales, heads, KV_HEADS, V_HEAD_DIM, PADDED_V_DIM, FORMAT
            )
