# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Stores into the paged cache: blocks of 32 tokens, inside a layer's part ``[kv_head][32][width]``."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import clamp, fp8_bits, round_fp8, round_whole


@triton.jit
def cache_row(cache, slot, BLOCK_STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Where head 0 of the token in ``slot`` lies; head h lies 32 * WIDTH * h elements on."""
    return cache + (slot // 32).to(tl.int64) * BLOCK_STRIDE + (slot % 32) * WIDTH


@triton.jit
def as_stored(x, scales, heads, count, KIND: tl.constexpr, FORMAT: tl.constexpr):
    """Numbers of ``heads`` [G, width] as the cache holds them.

    FORMAT: "" converts to KIND; "int8" and "fp8" divide by the head's scale, round and saturate. KIND of fp8
    is float8 e4m3fn, or bytes where the architecture does not know it.
    """
    if FORMAT == "":
        stored = x.to(KIND)
    else:
        scale = tl.load(scales + heads, mask=heads < count, other=1.0)[:, None]
        x = tl.div_rn(x.to(tl.float32), scale)
        if FORMAT == "int8":
            stored = round_whole(clamp(x, 127.0)).to(KIND)
        else:
            stored = fp8_bits(round_fp8(x)).to(KIND, bitcast=True)
    return stored


@triton.jit
def store_rows(
    x_row,
    row,
    scales,
    heads,
    count,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Copy the heads of one token, [count, WIDTH] without gaps, into the cache."""
    column = tl.arange(0, PADDED_WIDTH)
    mask = (heads < count)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_row + heads[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    x = as_stored(x, scales, heads, count, row.dtype.element_ty, FORMAT)
    tl.store(row + heads[:, None] * (32 * WIDTH) + column[None, :], x, mask=mask)


@triton.jit
def write_kv(
    k,
    v,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    slots,
    k_stride,
    v_stride,
    KV_HEADS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_V_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store keys [T, KV_HEADS * HEAD_DIM] and values; rows whose slot is -1 store nothing.

    FORMAT "int8" or "fp8" rounds by scales f32 [KV_HEADS]. Grid (T, groups of heads).
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    k_row = cache_row(k_cache, slot, BLOCK_STRIDE, HEAD_DIM)
    store_rows(k + token * k_stride, k_row, k_scales, heads, KV_HEADS, HEAD_DIM, PADDED_DIM, FORMAT)
    v_row = cache_row(v_cache, slot, BLOCK_STRIDE, V_HEAD_DIM)
    store_rows(v + token * v_stride, v_row, v_scales, heads, KV_HEADS, V_HEAD_DIM, PADDED_V_DIM, FORMAT)
