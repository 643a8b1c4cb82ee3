# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Products of float4 by float4 with the scales of their blocks in the matrix unit (sm_100 and later)."""

from __future__ import annotations

import triton
import triton.language as tl

from .linear import epilogue, tile_of


@triton.jit
def _scales(at, mask, GROUP: tl.constexpr):
    """Scales of a tile: e4m3 of blocks of 16, e8m0 of blocks of 32."""
    bits = tl.load(at, mask=mask, other=0)
    if GROUP == 16:
        scales = bits.to(tl.float8e4nv, bitcast=True)
    else:
        scales = bits
    return scales


@triton.jit
def scaled_tile(
    x,
    x_blocks,
    x_scales,
    codes,
    blocks,
    row_scales,
    bias,
    residual,
    y,
    rows,
    residual_stride,
    x_scale,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    X_STRIDE: tl.constexpr,
    X_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One output tile a block.

    x: u8 [rows, X_STRIDE], x_blocks: u8 [rows, ceil(K/GROUP)], codes: u8 [N, ceil(K/16) * 8] (gated:
    [2N, ..]), blocks: u8 [N, ceil(K/GROUP)]. Both operands hold two codes a byte in layout "words", so the
    inputs of a block lie in one order in either. GROUP 16: row_scales f32 [N], and x_scale or, X_SCALES
    "rows", x_scales f32 [rows] multiply the sums.
    """
    W_STRIDE: tl.constexpr = tl.cdiv(K, 16) * 8
    GROUPS: tl.constexpr = tl.cdiv(K, GROUP)
    BYTES: tl.constexpr = BLOCK_K // 2
    IN_STEP: tl.constexpr = BLOCK_K // GROUP
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_M), TILES_N, GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    byte = tl.arange(0, BYTES)[None, :]
    group = tl.arange(0, IN_STEP)[None, :]
    x_tile = x + m.to(tl.int64) * X_STRIDE + byte
    w_tile = codes + n.to(tl.int64) * W_STRIDE + byte
    x_blocks_tile = x_blocks + m.to(tl.int64) * GROUPS + group
    w_blocks_tile = blocks + n.to(tl.int64) * GROUPS + group
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    TAIL: tl.constexpr = K % BLOCK_K != 0
    for step in tl.range(0, tl.cdiv(K, BLOCK_K)):
        at = step * BYTES
        first = step * IN_STEP
        x_mask = m < rows
        w_mask = n < N
        x_blocks_mask = x_mask
        w_blocks_mask = w_mask
        if TAIL:
            x_mask = x_mask & (byte < X_STRIDE - at)
            w_mask = w_mask & (byte < W_STRIDE - at)
            x_blocks_mask = x_blocks_mask & (group < GROUPS - first)
            w_blocks_mask = w_blocks_mask & (group < GROUPS - first)
        xs = tl.load(x_tile + at, mask=x_mask, other=0)
        x_scale_tile = _scales(x_blocks_tile + first, x_blocks_mask, GROUP)
        ws = tl.load(w_tile + at, mask=w_mask, other=0)
        w_scale_tile = _scales(w_blocks_tile + first, w_blocks_mask, GROUP)
        acc = tl.dot_scaled(xs, x_scale_tile, "e2m1", ws.T, w_scale_tile, "e2m1", acc)
        if GATED:
            ws = tl.load(w_tile + N * W_STRIDE + at, mask=w_mask, other=0)
            w_scale_tile = _scales(w_blocks_tile + N * GROUPS + first, w_blocks_mask, GROUP)
            up = tl.dot_scaled(xs, x_scale_tile, "e2m1", ws.T, w_scale_tile, "e2m1", up)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if GROUP == 16:
        of_x = x_scale
        if X_SCALES == "rows":
            of_x = tl.load(x_scales + m, mask=m < rows, other=0.0)
        acc = acc * (tl.load(row_scales + n, mask=n < N, other=0.0) * of_x)
        if GATED:
            up = up * (tl.load(row_scales + N + n, mask=n < N, other=0.0) * of_x)
    operands = (bias, residual, y, rows, residual_stride)
    FORM: tl.constexpr = (GATED, ACTIVATION, ALPHA, HAS_BIAS, HAS_RESIDUAL)
    epilogue(acc, up, m, n, operands, N, FORM)
