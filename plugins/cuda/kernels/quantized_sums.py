# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Sums of products with weights held as codes of 4 or 8 bits, of few rows and of tiles.

``codes``: int8 or float8 e4m3fn [N, K], or 32-bit words of eight 4-bit codes (layout "words" of
engines/program.py), of which a step multiplies four quarters, one after the other. Gated: gate's rows, then
up's, UP rows further on.

MATH says what meets in the matrix unit: "half" (codes become bfloat16 or float16), "int8" or "fp8" (codes as
they are, x's too). SCALES says where weights are scaled:

- "rows": one scale a row, applied to the sum;
- "sums": GROUP inputs share a scale, applied to the sum of a step, which lies inside one group;
- "weights": each weight is scaled, and its offset added, before it is rounded to half;
- "e4m3", "e8m0": float4 weights meet their block's scale in half precision, exactly; e4m3 ones leave a scale
  of the row.

x is scaled by ``x_scale`` or, X_SCALES: by one scale a row ("rows"), or one for X_GROUP inputs ("sums").

CODING: K, GROUP, X_GROUP, MATH, FORMAT, SCALES, X_SCALES, HAS_OFFSETS, HALF.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import decoded, decoded_part, power_of_two
from .linear import load


@triton.jit
def _spread(scales, TIMES: tl.constexpr):
    """Each number of the last axis TIMES times; a single one broadcasts as it is."""
    RANK: tl.constexpr = len(scales.shape)
    if scales.shape[RANK - 1] == 1:
        result = scales
    elif RANK == 2:
        wide = tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], TIMES])
        result = tl.reshape(wide, [scales.shape[0], scales.shape[1] * TIMES])
    else:
        wide = tl.broadcast_to(
            scales[:, :, :, None], [scales.shape[0], scales.shape[1], scales.shape[2], TIMES]
        )
        result = tl.reshape(wide, [scales.shape[0], scales.shape[1], scales.shape[2] * TIMES])
    return result


@triton.jit
def _scaled(numbers, scales, offsets, SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr, TIMES: tl.constexpr):
    """Weights in half precision; ``numbers`` are theirs before scaling."""
    HALF: tl.constexpr = numbers.dtype
    if SCALES == "weights":
        weights = numbers * _spread(scales.to(HALF), TIMES)
        if HAS_OFFSETS:
            weights += _spread(offsets.to(HALF), TIMES)
    elif SCALES == "e4m3":
        weights = numbers * _spread(decoded(scales, "fp8", HALF), TIMES)
    elif SCALES == "e8m0":
        weights = numbers * _spread(power_of_two(scales).to(HALF), TIMES)
    else:
        weights = numbers
    return weights


@triton.jit
def _scales_of(at, up_at, mask, GATED: tl.constexpr):
    """Scales, or offsets, of a step: gate's (or the only ones) and up's."""
    first = tl.load(at, mask=mask, other=0)
    second = first
    if GATED:
        second = tl.load(up_at, mask=mask, other=0)
    return first, second


@triton.jit
def _advance(
    acc,
    up,
    codes,
    up_codes,
    x_at,
    x_inside,
    left,
    k_of_x,
    scales,
    offsets,
    factors,
    MATH: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HALF: tl.constexpr,
    TIMES: tl.constexpr,
    TAIL: tl.constexpr,
    GATED: tl.constexpr,
    IN_SUMS: tl.constexpr,
):
    """Sums with one step's products added. ``scales``, ``offsets``, ``factors``: gate's and up's.

    ``left``: inputs from this step on. IN_SUMS: products are multiplied by a factor before they are added.
    """
    PACKED: tl.constexpr = FORMAT == "int4" or FORMAT == "fp4"
    DTYPE: tl.constexpr = tl.bfloat16 if HALF == "bf16" else tl.float16
    KIND: tl.constexpr = tl.int32 if MATH == "int8" else tl.float32
    sums = acc
    up_sums = up
    if IN_SUMS:
        sums = tl.zeros(acc.shape, KIND)
        up_sums = tl.zeros(acc.shape, KIND)
    PARTS: tl.constexpr = 4 if PACKED else 1
    QUARTER: tl.constexpr = 8 if FORMAT == "int4" else 4
    for part in tl.static_range(PARTS):
        x_mask = x_inside
        if TAIL:
            x_mask = x_mask & (k_of_x + part * QUARTER < left)
        xs = tl.load(x_at + part * QUARTER, mask=x_mask, other=0.0)
        if MATH == "half":
            xs = xs.to(DTYPE)
            if PACKED:
                numbers = decoded_part(codes, part, FORMAT, DTYPE)
            else:
                numbers = decoded(codes, FORMAT, DTYPE)
            weights = _scaled(numbers, scales[0], offsets[0], SCALES, HAS_OFFSETS, TIMES)
        else:
            weights = codes
        sums = tl.dot(weights, xs, sums, out_dtype=KIND)
        if GATED:
            if MATH == "half":
                if PACKED:
                    numbers = decoded_part(up_codes, part, FORMAT, DTYPE)
                else:
                    numbers = decoded(up_codes, FORMAT, DTYPE)
                up_weights = _scaled(numbers, scales[1], offsets[1], SCALES, HAS_OFFSETS, TIMES)
            else:
                up_weights = up_codes
            up_sums = tl.dot(up_weights, xs, up_sums, out_dtype=KIND)
    if IN_SUMS:
        sums = acc + sums.to(tl.float32) * factors[0]
        if GATED:
            up_sums = up + up_sums.to(tl.float32) * factors[1]
        else:
            up_sums = up
    return sums, up_sums


@triton.jit
def scaled_sums(
    acc,
    up,
    operands,
    x_row,
    x_inside,
    w_row,
    w_inside,
    UP: tl.constexpr,
    CODING: tl.constexpr,
    GATED: tl.constexpr,
):
    """Sums in float32 with the scales of whole rows of weights and of x; ``operands`` as in stream_sums."""
    SCALES: tl.constexpr = CODING[5]
    row_scales = operands[5]
    acc = acc.to(tl.float32)
    up = up.to(tl.float32)
    of_x = operands[6]
    if CODING[6] == "rows":
        of_x = tl.load(operands[1] + x_row, mask=x_inside, other=0.0)
    if SCALES == "rows" or SCALES == "e4m3":
        acc = acc * (tl.load(row_scales + w_row, mask=w_inside, other=0.0).to(tl.float32) * of_x)
        if GATED:
            up = up * (tl.load(row_scales + UP + w_row, mask=w_inside, other=0.0).to(tl.float32) * of_x)
    else:
        acc = acc * of_x
        up = up * of_x
    return acc, up


@triton.jit
def quantized_stream_sums(
    operands,
    x_row,
    x_inside,
    first_row,
    w_inside,
    x_stride,
    UP: tl.constexpr,
    W_MASKED: tl.constexpr,
    CODING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Sums [BLOCK_N, BLOCK_M] of rows ``x_row`` by weight rows from ``first_row`` (64 bits) on, unscaled.

    As stream_sums of linear.py: each warp takes its BLOCK_K of every WARPS * BLOCK_K inputs. ``operands``: x,
    x_scales, codes, scales, offsets, row_scales, x_scale. Masks and ``x_row`` broadcast to [1, BLOCK_N,
    BLOCK_M].
    """
    K: tl.constexpr = CODING[0]
    GROUP: tl.constexpr = CODING[1]
    X_GROUP: tl.constexpr = CODING[2]
    MATH: tl.constexpr = CODING[3]
    FORMAT: tl.constexpr = CODING[4]
    SCALES: tl.constexpr = CODING[5]
    X_SCALES: tl.constexpr = CODING[6]
    HAS_OFFSETS: tl.constexpr = CODING[7]
    PACKED: tl.constexpr = FORMAT == "int4" or FORMAT == "fp4"
    RUN: tl.constexpr = (32 if FORMAT == "int4" else 16) if PACKED else 1
    PER_CODE: tl.constexpr = 8 if PACKED else 1
    WIDTH: tl.constexpr = BLOCK_K // PER_CODE
    ROW: tl.constexpr = tl.cdiv(K, RUN) * RUN // PER_CODE
    IN_SUMS: tl.constexpr = SCALES == "sums" or X_SCALES == "sums"
    GROUPS: tl.constexpr = tl.cdiv(K, GROUP)
    IN_STEP: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
    X_WIDTH: tl.constexpr = BLOCK_K // 4 if PACKED else BLOCK_K
    TIMES: tl.constexpr = X_WIDTH // IN_STEP
    X_GROUPS: tl.constexpr = tl.cdiv(K, X_GROUP)
    KIND: tl.constexpr = tl.int32 if MATH == "int8" and not IN_SUMS else tl.float32
    x, x_scales, codes, scales, offsets = operands[:5]
    part = tl.arange(0, WARPS)[:, None, None]
    n = tl.arange(0, BLOCK_N)[None, :, None]
    column = part * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    k_of_x = tl.arange(0, X_WIDTH)[None, :, None]
    if PACKED:
        k_of_x = k_of_x // (RUN // 4) * RUN + k_of_x % (RUN // 4)
    k_of_x += part * BLOCK_K
    w_tile = codes + first_row * ROW + n * ROW + column
    x_tile = x + x_row * x_stride + k_of_x
    group = tl.arange(0, IN_STEP)[None, None, :]
    scale_row = (first_row + n) * GROUPS
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], KIND)
    up = tl.zeros([WARPS, BLOCK_N, BLOCK_M], KIND)
    TAIL: tl.constexpr = K % (WARPS * BLOCK_K) != 0
    for k in tl.range(0, K, WARPS * BLOCK_K):
        at = k // PER_CODE
        w_mask = w_inside
        if TAIL:
            w_mask = w_mask & (at + column < ROW)
        block = load(w_tile + at, w_mask, TAIL or W_MASKED)
        up_block = block
        if GATED:
            up_block = load(w_tile + UP * ROW + at, w_mask, TAIL or W_MASKED)
        scale = (0, 0)
        offset = (0, 0)
        factors = (1.0, 1.0)
        if SCALES != "rows":
            number = (k + part * BLOCK_K) // GROUP + group
            mask = w_inside & (number < GROUPS)
            scale_at = scales + scale_row + number
            scale = _scales_of(scale_at, scale_at + UP * GROUPS, mask, GATED)
            if HAS_OFFSETS:
                offset_at = offsets + scale_row + number
                offset = _scales_of(offset_at, offset_at + UP * GROUPS, mask, GATED)
            if SCALES == "sums":
                factors = (scale[0].to(tl.float32), scale[1].to(tl.float32))
        if X_SCALES == "sums":
            number_of_x = (k + part * BLOCK_K) // X_GROUP
            at_x = x_scales + x_row * X_GROUPS + number_of_x
            of_x = tl.load(at_x, mask=x_inside & (number_of_x < X_GROUPS), other=0.0)
            factors = (factors[0] * of_x, factors[1] * of_x)
        acc, up = _advance(
            acc, up, block, up_block, x_tile + k, x_inside, K - k, k_of_x, scale, offset, factors,
            MATH, FORMAT, SCALES, HAS_OFFSETS, CODING[8], TIMES, TAIL, GATED, IN_SUMS,
        )  # fmt: skip
    return tl.sum(acc, axis=0), tl.sum(up, axis=0)


@triton.jit
def quantized_tile_sums(
    operands,
    x_row,
    x_inside,
    w_row,
    w_inside,
    x_stride,
    first_k,
    UP: tl.constexpr,
    W_MASKED: tl.constexpr,
    STEPS: tl.constexpr,
    TAIL: tl.constexpr,
    CODING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
):
    """Sums [BLOCK_N, BLOCK_M] over STEPS times BLOCK_K inputs from ``first_k`` on, unscaled.

    ``w_row`` [BLOCK_N, 1] and ``x_row`` [1, BLOCK_M] are numbers of rows, of 64 bits. TAIL: some of the
    inputs may lie behind the last one.
    """
    K: tl.constexpr = CODING[0]
    GROUP: tl.constexpr = CODING[1]
    X_GROUP: tl.constexpr = CODING[2]
    MATH: tl.constexpr = CODING[3]
    FORMAT: tl.constexpr = CODING[4]
    SCALES: tl.constexpr = CODING[5]
    X_SCALES: tl.constexpr = CODING[6]
    HAS_OFFSETS: tl.constexpr = CODING[7]
    PACKED: tl.constexpr = FORMAT == "int4" or FORMAT == "fp4"
    RUN: tl.constexpr = (32 if FORMAT == "int4" else 16) if PACKED else 1
    PER_CODE: tl.constexpr = 8 if PACKED else 1
    WIDTH: tl.constexpr = BLOCK_K // PER_CODE
    ROW: tl.constexpr = tl.cdiv(K, RUN) * RUN // PER_CODE
    IN_SUMS: tl.constexpr = SCALES == "sums" or X_SCALES == "sums"
    GROUPS: tl.constexpr = tl.cdiv(K, GROUP)
    IN_STEP: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
    X_WIDTH: tl.constexpr = BLOCK_K // 4 if PACKED else BLOCK_K
    TIMES: tl.constexpr = X_WIDTH // IN_STEP
    X_GROUPS: tl.constexpr = tl.cdiv(K, X_GROUP)
    KIND: tl.constexpr = tl.int32 if MATH == "int8" and not IN_SUMS else tl.float32
    x, x_scales, codes, scales, offsets = operands[:5]
    column = tl.arange(0, WIDTH)[None, :]
    k_of_x = tl.arange(0, X_WIDTH)[:, None]
    if PACKED:
        k_of_x = k_of_x // (RUN // 4) * RUN + k_of_x % (RUN // 4)
    w_tile = codes + w_row * ROW + column
    x_tile = x + x_row * x_stride + k_of_x
    group = tl.arange(0, IN_STEP)[None, :]
    scale_row = w_row * GROUPS
    acc = tl.zeros([BLOCK_N, BLOCK_M], KIND)
    up = tl.zeros([BLOCK_N, BLOCK_M], KIND)
    for step in tl.range(0, STEPS):
        k = first_k + step * BLOCK_K
        at = k // PER_CODE
        w_mask = w_inside
        if TAIL:
            w_mask = w_mask & (column < ROW - at)
        words = load(w_tile + at, w_mask, TAIL or W_MASKED)
        up_words = words
        if GATED:
            up_words = load(w_tile + UP * ROW + at, w_mask, TAIL or W_MASKED)
        scale = (0, 0)
        offset = (0, 0)
        factors = (1.0, 1.0)
        if SCALES != "rows":
            number = k // GROUP + group
            mask = w_inside & (number < GROUPS)
            scale_at = scales + scale_row + number
            scale = _scales_of(scale_at, scale_at + UP * GROUPS, mask, GATED)
            if HAS_OFFSETS:
                offset_at = offsets + scale_row + number
                offset = _scales_of(offset_at, offset_at + UP * GROUPS, mask, GATED)
            if SCALES == "sums":
                factors = (scale[0].to(tl.float32), scale[1].to(tl.float32))
        if X_SCALES == "sums":
            number_of_x = k // X_GROUP + 0 * x_row
            at_x = x_scales + x_row * X_GROUPS + number_of_x
            of_x = tl.load(at_x, mask=x_inside & (number_of_x < X_GROUPS), other=0.0)
            factors = (factors[0] * of_x, factors[1] * of_x)
        acc, up = _advance(
            acc, up, words, up_words, x_tile + k, x_inside, K - k, k_of_x, scale, offset, factors,
            MATH, FORMAT, SCALES, HAS_OFFSETS, CODING[8], TIMES, TAIL, GATED, IN_SUMS,
        )  # fmt: skip
    return acc, up
