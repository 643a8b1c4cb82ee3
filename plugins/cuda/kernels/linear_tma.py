"""Large matrix products on sm_90 and later: blocks that stay, tiles fetched by the memory accelerator."""

from __future__ import annotations

import triton
import triton.language as tl

from .linear import epilogue, tile_of


@triton.jit
def _halves(block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Left and right half of the columns."""
    return tl.permute(tl.reshape(block, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)).split()


@triton.jit
def _in_halves(
    acc, m, n, operands, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORM: tl.constexpr
):
    """Finish COLUMNS columns from ``n`` on in halves, so that registers hold half a residual at a time."""
    left, right = _halves(acc, ROWS, COLUMNS)
    column = tl.arange(0, COLUMNS // 2)[None, :]
    epilogue(left, left, m, n + column, operands, N, FORM)
    epilogue(right, right, m, n + COLUMNS // 2 + column, operands, N, FORM)


@triton.jit
def linear_tma(
    x,
    w,
    bias,
    residual,
    y,
    rows,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """As linear_tile; x is [rows, K] without gaps, in the weights' type, and K a multiple of 8.

    What lies outside of a tensor is read as zero: rows behind the last one, and inputs behind K.
    SPECIALIZE: warps that only fetch feed warps that only multiply.
    """
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    W_ROWS: tl.constexpr = 2 * N if GATED else N
    tiles_m = tl.cdiv(rows, BLOCK_M)
    x_tiles = tl.make_tensor_descriptor(x, shape=[rows, K], strides=[K, 1], block_shape=[BLOCK_M, BLOCK_K])
    w_tiles = tl.make_tensor_descriptor(w, shape=[W_ROWS, K], strides=[K, 1], block_shape=[BLOCK_N, BLOCK_K])
    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0), warp_specialize=SPECIALIZE):
        tile_m, tile_n = tile_of(tile, tiles_m, TILES_N, GROUP_M)
        first_m = tile_m * BLOCK_M
        first_n = tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            xs = x_tiles.load([first_m, k])
            acc = tl.dot(xs, w_tiles.load([first_n, k]).T, acc)
            if GATED:
                up = tl.dot(xs, w_tiles.load([N + first_n, k]).T, up)
        m = first_m + tl.arange(0, BLOCK_M)[:, None]
        operands = (bias, residual, y, rows, residual_stride)
        FORM: tl.constexpr = (GATED, ACTIVATION, ALPHA, HAS_BIAS, HAS_RESIDUAL)
        if GATED:
            epilogue(acc, up, m, first_n + tl.arange(0, BLOCK_N)[None, :], operands, N, FORM)
        else:
            left, right = _halves(acc, BLOCK_M, BLOCK_N)
            _in_halves(left, m, first_n, operands, N, BLOCK_M, BLOCK_N // 2, FORM)
            _in_halves(right, m, first_n + BLOCK_N // 2, operands, N, BLOCK_M, BLOCK_N // 2, FORM)
