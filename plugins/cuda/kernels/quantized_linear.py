# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Products with weights held as codes of 4 or 8 bits (quantized_sums.py) and the epilogues of linear.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .linear import epilogue, tile_of
from .quantized_sums import quantized_stream_sums, quantized_tile_sums, scaled_sums


@triton.jit
def quantized_stream(
    x,
    x_scales,
    codes,
    scales,
    row_scales,
    offsets,
    bias,
    x_stride,
    x_scale,
    residual,
    y,
    rows,
    residual_stride,
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
    CODING: tl.constexpr = (K, GROUP, X_GROUP, MATH, FORMAT, SCALES, X_SCALES, HAS_OFFSETS, HALF)
    first = tl.program_id(0) * BLOCK_N
    m = tl.arange(0, BLOCK_M)[None, :]
    n = first + tl.arange(0, BLOCK_N)[:, None]
    read = (x, x_scales, codes, scales, offsets, row_scales, x_scale)
    acc, up = quantized_stream_sums(
        *(read, m[None], (m < rows)[None], first.to(tl.int64), (n < N)[None], x_stride, N, N % BLOCK_N != 0),
        *(CODING, BLOCK_M, BLOCK_N, BLOCK_K, WARPS, GATED),
    )
    acc, up = scaled_sums(acc, up, read, m, m < rows, n, n < N, N, CODING, GATED)
    operands = (bias, residual, y, rows, residual_stride)
    FORM: tl.constexpr = (GATED, ACTIVATION, ALPHA, HAS_BIAS, HAS_RESIDUAL)
    epilogue(acc, up, m, n, operands, N, FORM)


@triton.jit
def quantized_tile(
    x,
    x_scales,
    codes,
    scales,
    row_scales,
    offsets,
    bias,
    x_stride,
    x_scale,
    residual,
    y,
    rows,
    residual_stride,
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
    CODING: tl.constexpr = (K, GROUP, X_GROUP, MATH, FORMAT, SCALES, X_SCALES, HAS_OFFSETS, HALF)
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    STEPS: tl.constexpr = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    block = tl.program_id(0)
    tile_m, tile_n = tile_of(block // SPLITS, tl.cdiv(rows, BLOCK_M), TILES_N, GROUP_M)
    first_k = (block % SPLITS) * (STEPS * BLOCK_K)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    read = (x, x_scales, codes, scales, offsets, row_scales, x_scale)
    acc, up = quantized_tile_sums(
        *(read, m.to(tl.int64), m < rows, n.to(tl.int64), n < N, x_stride, first_k, N, N % BLOCK_N != 0),
        *(STEPS, K % (SPLITS * BLOCK_K) != 0, CODING, BLOCK_M, BLOCK_N, BLOCK_K, GATED),
    )
    acc, up = scaled_sums(acc, up, read, m, m < rows, n, n < N, N, CODING, GATED)
    if SPLITS == 1:
        operands = (bias, residual, y, rows, residual_stride)
        FORM: tl.constexpr = (GATED, ACTIVATION, ALPHA, HAS_BIAS, HAS_RESIDUAL)
        epilogue(acc, up, m, n, operands, N, FORM)
    else:
        ROW_SUMS: tl.constexpr = 2 * N if GATED else N
        inside = (m < rows) & (n < N)
        sums_at = y + ((block % SPLITS) * SPLIT_ROWS + m) * ROW_SUMS + n
        tl.store(sums_at, acc, mask=inside)
        if GATED:
            tl.store(sums_at + N, up, mask=inside)
