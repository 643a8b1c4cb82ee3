"""Matrix products with weights ``w`` [N, K] (gated: [2N, K], gate rows, then up rows) and their epilogues.

y = alpha · act(x · wᵀ + bias) + residual, or y = act(gate) · up. With ACTIVATION "sums" y is x · wᵀ alone,
f32 [rows, N], or [rows, 2N]. Products accumulate in float32 in one fixed order; x is cast to the weights'
type where it is float32. ``rows`` is the number of rows of this step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import apply


@triton.jit
def load(address, mask, MASKED: tl.constexpr):
    """A load whose mask is dropped where the shape makes it true everywhere."""
    if MASKED:
        block = tl.load(address, mask=mask, other=0.0)
    else:
        block = tl.load(address)
    return block


@triton.jit
def _finish(acc, up, m, n, operands, N: tl.constexpr, FORM: tl.constexpr):
    bias, residual, y, rows, residual_stride = operands
    GATED: tl.constexpr = FORM[0]
    if FORM[3]:
        acc += tl.load(bias + n, mask=n < N, other=0.0)
        if GATED:
            up += tl.load(bias + N + n, mask=n < N, other=0.0)
    value = apply(acc, FORM[1])
    if GATED:
        value = value * up
    if FORM[2] != 1.0:
        value = value * FORM[2]
    inside = (m < rows) & (n < N)
    row = m.to(tl.int64)
    if FORM[4]:
        value += tl.load(residual + row * residual_stride + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + n, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _store_sums(acc, up, m, n, operands, N: tl.constexpr, GATED: tl.constexpr):
    at = operands[2] + m.to(tl.int64) * (2 * N if GATED else N) + n
    inside = (m < operands[3]) & (n < N)
    tl.store(at, acc, mask=inside)
    if GATED:
        tl.store(at + N, up, mask=inside)


@triton.jit
def epilogue(acc, up, m, n, operands, N: tl.constexpr, FORM: tl.constexpr):
    """Finish and store a tile; ``m`` and ``n`` are its row and column numbers, broadcastable to ``acc``.

    ``operands``: bias, residual, y, rows, residual_stride.
    ``FORM``: GATED, ACTIVATION, ALPHA, HAS_BIAS, HAS_RESIDUAL.
    """
    if FORM[1] == "sums":
        _store_sums(acc, up, m, n, operands, N, FORM[0])
    else:
        _finish(acc, up, m, n, operands, N, FORM)


@triton.jit
def stream_sums(
    x_tile,
    w_tile,
    x_inside,
    w_inside,
    k_of_x,
    k_of_w,
    UP: tl.constexpr,
    W_MASKED: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Sums [BLOCK_N, BLOCK_M] over all K inputs, and those of the weights UP elements further on if GATED.

    ``x_tile`` [WARPS, BLOCK_K, BLOCK_M] and ``w_tile`` [WARPS, BLOCK_N, BLOCK_K] are the addresses of the
    first step, in which each warp has inputs of its own, ``k_of_x`` and ``k_of_w``.
    """
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    TAIL: tl.constexpr = K % (WARPS * BLOCK_K) != 0
    for k in tl.range(0, K, WARPS * BLOCK_K):
        w_mask = w_inside
        x_mask = x_inside
        if TAIL:
            w_mask = w_mask & (k + k_of_w < K)
            x_mask = x_mask & (k + k_of_x < K)
        xs = tl.load(x_tile + k, mask=x_mask, other=0.0).to(w_tile.dtype.element_ty)
        acc = tl.dot(load(w_tile + k, w_mask, TAIL or W_MASKED), xs, acc)
        if GATED:
            up = tl.dot(load(w_tile + UP + k, w_mask, TAIL or W_MASKED), xs, up)
    return tl.sum(acc, axis=0), tl.sum(up, axis=0)


@triton.jit
def linear_stream(
    x,
    w,
    bias,
    residual,
    y,
    rows,
    x_stride,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
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
    """At most BLOCK_M rows: each block streams BLOCK_N rows of the weights once, at memory speed.

    The leading dimension of the product is spread over the warps, so each takes its own BLOCK_K of every
    WARPS * BLOCK_K inputs: blocks stay small enough to fill the device and no warp loads what another has.
    """
    first = tl.program_id(0) * BLOCK_N
    part = tl.arange(0, WARPS)[:, None, None]
    n = tl.arange(0, BLOCK_N)[None, :, None]
    m = tl.arange(0, BLOCK_M)[None, None, :]
    k_of_w = part * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    k_of_x = part * BLOCK_K + tl.arange(0, BLOCK_K)[None, :, None]
    w_tile = w + first.to(tl.int64) * K + n * K + k_of_w
    x_tile = x + m * x_stride + k_of_x
    w_inside = first + n < N
    x_inside = m < rows
    acc, up = stream_sums(
        *(x_tile, w_tile, x_inside, w_inside, k_of_x, k_of_w, N * K, N % BLOCK_N != 0),
        *(K, BLOCK_M, BLOCK_N, BLOCK_K, WARPS, GATED),
    )
    n = first + tl.arange(0, BLOCK_N)[:, None]
    m = tl.arange(0, BLOCK_M)[None, :]
    operands = (bias, residual, y, rows, residual_stride)
    FORM: tl.constexpr = (GATED, ACTIVATION, ALPHA, HAS_BIAS, HAS_RESIDUAL)
    epilogue(acc, up, m, n, operands, N, FORM)


@triton.jit
def tile_of(index, tiles_m, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile (row, column) of a block: GROUP_M row tiles share the weights they read while these are in L2."""
    group = index // (GROUP_M * TILES_N)
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    inside = index % (GROUP_M * TILES_N)
    return first + inside % height, inside // height


@triton.jit
def tile_sums(
    x_tile,
    w_tile,
    x_inside,
    w_inside,
    k,
    first_k,
    UP: tl.constexpr,
    W_MASKED: tl.constexpr,
    STEPS: tl.constexpr,
    TAIL: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
):
    """Sums [BLOCK_M, BLOCK_N] over STEPS times BLOCK_K inputs from ``first_k`` on; ``up`` as in stream_sums.

    ``x_tile`` [BLOCK_M, BLOCK_K] and ``w_tile`` [BLOCK_N, BLOCK_K] are addresses of inputs ``k``. TAIL: some
    of the inputs may lie behind the last one.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, STEPS):
        at = first_k + step * BLOCK_K
        w_mask = w_inside
        x_mask = x_inside
        if TAIL:
            w_mask = w_mask & (k < K - at)
            x_mask = x_mask & (k < K - at)
        xs = tl.load(x_tile + at, mask=x_mask, other=0.0).to(w_tile.dtype.element_ty)
        acc = tl.dot(xs, load(w_tile + at, w_mask, TAIL or W_MASKED).T, acc)
        if GATED:
            up = tl.dot(xs, load(w_tile + UP + at, w_mask, TAIL or W_MASKED).T, up)
    return acc, up


@triton.jit
def linear_tile(
    x,
    w,
    bias,
    residual,
    y,
    rows,
    x_stride,
    residual_stride,
    N: tl.constexpr,
    K: tl.constexpr,
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
    """One output tile a block. With SPLITS > 1, ``y`` takes the float32 sums of each part of K instead.

    Then y is [SPLITS, SPLIT_ROWS, N], or [SPLITS, SPLIT_ROWS, 2N] when gated, and linear_reduce finishes.
    """
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    STEPS: tl.constexpr = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    block = tl.program_id(0)
    tile_m, tile_n = tile_of(block // SPLITS, tl.cdiv(rows, BLOCK_M), TILES_N, GROUP_M)
    first_k = (block % SPLITS) * (STEPS * BLOCK_K)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    x_tile = x + m.to(tl.int64) * x_stride + k
    w_tile = w + n.to(tl.int64) * K + k
    acc, up = tile_sums(
        *(x_tile, w_tile, m < rows, n < N, k, first_k, N * K, N % BLOCK_N != 0),
        *(STEPS, K % (SPLITS * BLOCK_K) != 0, K, BLOCK_M, BLOCK_N, BLOCK_K, GATED),
    )
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if SPLITS == 1:
        operands = (bias, residual, y, rows, residual_stride)
        FORM: tl.constexpr = (GATED, ACTIVATION, ALPHA, HAS_BIAS, HAS_RESIDUAL)
        epilogue(acc, up, m, n, operands, N, FORM)
    else:
        WIDTH: tl.constexpr = 2 * N if GATED else N
        inside = (m < rows) & (n < N)
        at = y + ((block % SPLITS) * SPLIT_ROWS + m) * WIDTH + n
        tl.store(at, acc, mask=inside)
        if GATED:
            tl.store(at + N, up, mask=inside)


@triton.jit
def linear_reduce(
    partials,
    bias,
    residual,
    y,
    rows,
    residual_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_ROWS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Add the parts of K in ascending order and finish: one block for BLOCK_N columns of a row."""
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    WIDTH: tl.constexpr = 2 * N if GATED else N
    n = (tl.program_id(0) % TILES_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.full([BLOCK_N], tl.program_id(0) // TILES_N, tl.int32)
    acc = tl.zeros([BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N], tl.float32)
    for split in tl.static_range(SPLITS):
        at = partials + (split * SPLIT_ROWS + m) * WIDTH + n
        acc += tl.load(at, mask=n < N, other=0.0)
        if GATED:
            up += tl.load(at + N, mask=n < N, other=0.0)
    operands = (bias, residual, y, rows, residual_stride)
    FORM: tl.constexpr = (GATED, ACTIVATION, ALPHA, HAS_BIAS, HAS_RESIDUAL)
    epilogue(acc, up, m, n, operands, N, FORM)
