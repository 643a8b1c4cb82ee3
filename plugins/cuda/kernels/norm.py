"""RMSNorm and LayerNorm over runs of columns, alone or of the sum of two inputs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    rows,
    x_stride,
    residual_stride,
    eps,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Block (i, g) norms run ``g`` of BLOCK_ROWS rows: WIDTH columns of GROUPS * WIDTH.

    CENTER: subtract the mean (LayerNorm). HAS_RESIDUAL: norm x + residual and store the sum in ``total``.
    Every element is read before its place is written, by the same thread: y may be x, total the residual.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    first = tl.program_id(1) * WIDTH
    inside = (row < rows) & (column < WIDTH)
    wide_row = row.to(tl.int64)
    value = tl.load(x + wide_row * x_stride + first + column, mask=inside, other=0.0).to(tl.float32)
    at = wide_row * (GROUPS * WIDTH) + first + column
    if HAS_RESIDUAL:
        value += tl.load(residual + wide_row * residual_stride + first + column, mask=inside, other=0.0).to(
            tl.float32
        )
        tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
    if CENTER:
        mean = tl.sum(value, axis=1, keep_dims=True) * (1.0 / WIDTH)
        value = tl.where(column < WIDTH, value - mean, 0.0)
    variance = tl.sum(value * value, axis=1, keep_dims=True) * (1.0 / WIDTH)
    value = value * (1.0 / tl.sqrt_rn(variance + eps))
    if HAS_WEIGHT:
        value = value * tl.load(weight + column, mask=column < WIDTH, other=0.0)
    if HAS_BIAS:
        value = value + tl.load(bias + column, mask=column < WIDTH, other=0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)
