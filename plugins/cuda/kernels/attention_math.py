# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""What prefill and decode attention share: from products of queries and keys to weights and their sums."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_scores(
    products,
    queries,
    keys,
    slopes,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Scores of a tile ``products`` [M, N]; -infinity where a key is not visible.

    ``queries`` [M, 1] and ``keys`` [1, N] are absolute positions, ``slopes`` those of ALiBi, [M, 1] or a
    number, or None. Plain scores stay unscaled: their factor goes into the exponent, where it costs nothing.
    """
    scores = products
    if SOFTCAP > 0:
        # tanh(x) by exp2, which is one instruction; its error, 1e-7, is multiplied by the cap alone.
        doubled = products * (2 * SCALE / SOFTCAP * LOG2E)
        scores = SOFTCAP * LOG2E - (2 * SOFTCAP * LOG2E) / (1 + tl.exp2(doubled))
    elif slopes is not None:
        scores = products * (SCALE * LOG2E)
    if slopes is not None:
        scores += slopes * LOG2E * (keys - queries).to(tl.float32)
    if MASKED:
        visible = keys <= queries
        if WINDOW > 0:
            visible = visible & (queries - keys < WINDOW)
        if CHUNK > 0:
            visible = visible & (queries // CHUNK == keys // CHUNK)
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def cache_blocks(table, first, stop, BLOCK_N: tl.constexpr):
    """The block of each of BLOCK_N keys from ``first`` on, 0 from ``stop`` on; ``first`` begins a block.

    One number for 32 keys at a time: addresses then differ by constants, which saves registers.
    """
    lane = tl.arange(0, BLOCK_N)
    blocks = lane * 0
    for part in tl.static_range(BLOCK_N // 32):
        block = tl.load(table + first // 32 + part, mask=first + 32 * part < stop, other=0)
        blocks = tl.where(lane // 32 == part, block, blocks)
    return blocks


@triton.jit
def first_visible(query, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that a query at this position sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(query - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(query // CHUNK * CHUNK, first)
    return first


@triton.jit
def online_softmax(scores, peak, FACTOR: tl.constexpr, MASKED: tl.constexpr):
    """Weights of a tile of scores, the new running maximum, and what older sums are to be multiplied by.

    ``peak`` [M]: running maximum in powers of two. A row without a visible key so far keeps -infinity and
    gets weights 0.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * FACTOR)
    subtracted = new_peak
    if MASKED:
        subtracted = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * FACTOR - subtracted[:, None])
    return weights, new_peak, tl.exp2(peak - subtracted)


@triton.jit
def product(a, b, accumulator, EXACT: tl.constexpr):
    """``accumulator + a @ b`` in float32; ``EXACT``: float32 operands without rounding to TF32."""
    if EXACT:
        return tl.dot(a, b, accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator)
