# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Matrix products with weights held as codes of 4 or 8 bits; epilogues and sums as in kernels/linear.py.

``codes``: int8 or float8 e4m3fn [N, K], or 32-bit words of eight 4-bit codes (layout "words" of
engines/program.py), of which a step multiplies four quarters, one after the other. Gated: gate's rows, then
up's.

MATH says what meets in the matrix unit: "half" (codes become bfloat16 or float16), "int8" or "fp8" (codes as
they are, x's too). SCALES says where weights are scaled:

- "rows": one scale a row, applied to the sum;
- "sums": GROUP inputs share a scale, applied to the sum of a step, which lies inside one group;
- "weights": each weight is scaled, and its offset added, before it is rounded to half;
- "e4m3", "e8m0": float4 weights meet their block's scale in half precision, exactly; e4m3 ones leave a scale
  of the row.

x is scaled by ``x_scale`` or, X_SCALES: by one scale a row ("rows"), or one for X_GROUP inputs ("sums").
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import decoded, decoded_part, power_of_two
from .linear import epilogue, load, tile_of


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
def _finished(
    acc,
    up,
    m,
    n,
    row_scales,
    x_scales,
    x_scale,
    rows,
    N: tl.constexpr,
    SCALES: tl.constexpr,
    X_SCALES: tl.constexpr,
    GATED: tl.constexpr,
):
    """Sums in float32 with the scales of whole rows of weights and of x."""
    acc = acc.to(tl.float32)
    up = up.to(tl.float32)
    of_x = x_scale
    if X_SCALES == "rows":
        of_x = tl.load(x_scales + m, mask=m < rows, other=0.0)
    if SCALES == "rows" or SCALES == "e4m3":
        acc = acc * (tl.load(row_scales + n, mask=n < N, other=0.0).to(tl.float32) * of_x)
        if GATED:
            up = up * (tl.load(row_scales + N + n, mask=n < N, other=0.0).to(tl.float32) * of_x)
    else:
        acc = acc * of_x
        up = up * of_x
    return acc, up


@triton.jit
def quantized_stream(
    x,
    x_scales,
    codes,
    scales,
    row_scales,
    offsets,
    bias,
    residual,
    y,
    rows,
    x_stride,
    residual_stride,
    x_scale,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """At most BLOCK_M rows: as linear_stream, each warp takes its BLOCK_K of every WARPS * BLOCK_K inputs."""
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

    first = tl.program_id(0) * BLOCK_N
    part = tl.arange(0, WARPS)[:, None, None]
    n = tl.arange(0, BLOCK_N)[None, :, None]
    m = tl.arange(0, BLOCK_M)[None, None, :]
    column = part * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    k_of_x = tl.arange(0, X_WIDTH)[None, :, None]
    if PACKED:
        k_of_x = k_of_x // (RUN // 4) * RUN + k_of_x % (RUN // 4)
    k_of_x += part * BLOCK_K
    w_tile = codes + first.to(tl.int64) * ROW + n * ROW + column
    x_tile = x + m * x_stride + k_of_x
    group = tl.arange(0, IN_STEP)[None, None, :]
    scale_row = (first + n).to(tl.int64) * GROUPS
    w_inside = first + n < N
    x_inside = m < rows
    KIND: tl.constexpr = tl.int32 if MATH == "int8" and not IN_SUMS else tl.float32
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], KIND)
    up = tl.zeros([WARPS, BLOCK_N, BLOCK_M], KIND)
    TAIL: tl.constexpr = K % (WARPS * BLOCK_K) != 0
    MASKED: tl.constexpr = TAIL or N % BLOCK_N != 0
    for k in tl.range(0, K, WARPS * BLOCK_K):
        at = k // PER_CODE
        w_mask = w_inside
        if TAIL:
            w_mask = w_mask & (at + column < ROW)
        block = load(w_tile + at, w_mask, MASKED)
        up_block = block
        if GATED:
            up_block = load(w_tile + N * ROW + at, w_mask, MASKED)
        scale = (0, 0)
        offset = (0, 0)
        factors = (1.0, 1.0)
        if SCALES != "rows":
            number = (k + part * BLOCK_K) // GROUP + group
            mask = w_inside & (number < GROUPS)
            scale_at = scales + scale_row + number
            scale = _scales_of(scale_at, scale_at + N * GROUPS, mask, GATED)
            if HAS_OFFSETS:
                offset_at = offsets + scale_row + number
                offset = _scales_of(offset_at, offset_at + N * GROUPS, mask, GATED)
            if SCALES == "sums":
                factors = (scale[0].to(tl.float32), scale[1].to(tl.float32))
        if X_SCALES == "sums":
            number_of_x = (k + part * BLOCK_K) // X_GROUP
            at_x = x_scales + m * X_GROUPS + number_of_x
            of_x = tl.load(at_x, mask=x_inside & (number_of_x < X_GROUPS), other=0.0)
            factors = (factors[0] * of_x, factors[1] * of_x)
        acc, up = _advance(
            acc, up, block, up_block, x_tile + k, x_inside, K - k, k_of_x, scale, offset, factors,
            MATH, FORMAT, SCALES, HAS_OFFSETS, HALF, TIMES, TAIL, GATED, IN_SUMS,
        )  # fmt: skip
    n = first + tl.arange(0, BLOCK_N)[:, None]
    m = tl.arange(0, BLOCK_M)[None, :]
    total, total_up = _finished(
        tl.sum(acc, axis=0), tl.sum(up, axis=0), m, n, row_scales, x_scales, x_scale, rows,
        N, SCALES, X_SCALES, GATED,
    )  # fmt: skip
    operands = (bias, residual, y, rows, residual_stride)
    FORM: tl.constexpr = (GATED, ACTIVATION, ALPHA, HAS_BIAS, HAS_RESIDUAL)
    epilogue(total, total_up, m, n, operands, N, FORM)


@triton.jit
def quantized_tile(
    x,
    x_scales,
    codes,
    scales,
    row_scales,
    offsets,
    bias,
    residual,
    y,
    rows,
    x_stride,
    residual_stride,
    x_scale,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_ROWS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One output tile a block, as linear_tile, but weights come first: [BLOCK_N, BLOCK_K] by x transposed.

    So warpgroup instructions take weights that have passed through registers from there.
    """
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
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    STEPS: tl.constexpr = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)

    block = tl.program_id(0)
    tile_m, tile_n = tile_of(block // SPLITS, tl.cdiv(rows, BLOCK_M), TILES_N, GROUP_M)
    first_k = (block % SPLITS) * (STEPS * BLOCK_K)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    column = tl.arange(0, WIDTH)[None, :]
    k_of_x = tl.arange(0, X_WIDTH)[:, None]
    if PACKED:
        k_of_x = k_of_x // (RUN // 4) * RUN + k_of_x % (RUN // 4)
    w_tile = codes + n.to(tl.int64) * ROW + column
    x_tile = x + m.to(tl.int64) * x_stride + k_of_x
    group = tl.arange(0, IN_STEP)[None, :]
    scale_row = n.to(tl.int64) * GROUPS
    w_inside = n < N
    x_inside = m < rows
    KIND: tl.constexpr = tl.int32 if MATH == "int8" and not IN_SUMS else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M], KIND)
    up = tl.zeros([BLOCK_N, BLOCK_M], KIND)
    TAIL: tl.constexpr = K % (SPLITS * BLOCK_K) != 0
    MASKED: tl.constexpr = TAIL or N % BLOCK_N != 0
    for step in tl.range(0, STEPS):
        k = first_k + step * BLOCK_K
        at = k // PER_CODE
        w_mask = w_inside
        if TAIL:
            w_mask = w_mask & (column < ROW - at)
        words = load(w_tile + at, w_mask, MASKED)
        up_words = words
        if GATED:
            up_words = load(w_tile + N * ROW + at, w_mask, MASKED)
        scale = (0, 0)
        offset = (0, 0)
        factors = (1.0, 1.0)
        if SCALES != "rows":
            number = k // GROUP + group
            mask = w_inside & (number < GROUPS)
            scale_at = scales + scale_row + number
            scale = _scales_of(scale_at, scale_at + N * GROUPS, mask, GATED)
            if HAS_OFFSETS:
                offset_at = offsets + scale_row + number
                offset = _scales_of(offset_at, offset_at + N * GROUPS, mask, GATED)
            if SCALES == "sums":
                factors = (scale[0].to(tl.float32), scale[1].to(tl.float32))
        if X_SCALES == "sums":
            number_of_x = k // X_GROUP + 0 * m
            at_x = x_scales + m.to(tl.int64) * X_GROUPS + number_of_x
            of_x = tl.load(at_x, mask=x_inside & (number_of_x < X_GROUPS), other=0.0)
            factors = (factors[0] * of_x, factors[1] * of_x)
        acc, up = _advance(
            acc, up, words, up_words, x_tile + k, x_inside, K - k, k_of_x, scale, offset, factors,
            MATH, FORMAT, SCALES, HAS_OFFSETS, HALF, TIMES, TAIL, GATED, IN_SUMS,
        )  # fmt: skip
    acc, up = _finished(
        acc, up, m, n, row_scales, x_scales, x_scale, rows, N, SCALES, X_SCALES, GATED
    )  # fmt: skip
    if SPLITS == 1:
        operands = (bias, residual, y, rows, residual_stride)
        FORM: tl.constexpr = (GATED, ACTIVATION, ALPHA, HAS_BIAS, HAS_RESIDUAL)
        epilogue(acc, up, m, n, operands, N, FORM)
    else:
        ROW_SUMS: tl.constexpr = 2 * N if GATED else N
        inside = x_inside & w_inside
        sums_at = y + ((block % SPLITS) * SPLIT_ROWS + m) * ROW_SUMS + n
        tl.store(sums_at, acc, mask=inside)
        if GATED:
            tl.store(sums_at + N, up, mask=inside)
