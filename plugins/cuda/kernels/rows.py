"""Rows of a table by index."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_rows(
    table,
    indices,
    y,
    table_stride,
    scale,
    WIDTH: tl.constexpr,
    INDEX_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Block (i, j): columns [j * BLOCK, ...) of row ``indices[i] + INDEX_OFFSET``, times ``scale``."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(indices + tl.program_id(0)).to(tl.int64) + INDEX_OFFSET
    value = tl.load(table + row * table_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    at = y + tl.program_id(0).to(tl.int64) * WIDTH + column
    tl.store(at, (value * scale).to(y.dtype.element_ty), mask=column < WIDTH)
