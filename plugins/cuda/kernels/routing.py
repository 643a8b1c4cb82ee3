"""What routers of mixtures pick: the largest of a row, numbers at picked places, weighted sums of outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from .generic import block_index, decode


@triton.jit
def _in_order(x):
    """Integers in the order of float32 numbers, both zeros alike, NaN below all."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)


@triton.jit
def top_k(
    x,
    values,
    places,
    n,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    PICKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PICKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The PICKS largest of each of TOTAL rows of x [.., WIDTH], in descending order, and their columns.

    Of equal ones the first. ROWS rows a block; BLOCK and BLOCK_PICKS cover WIDTH and PICKS.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < decode(TOTAL, n)
    column = tl.arange(0, BLOCK)[None, :]
    wide = row.to(tl.int64)[:, None]
    number = tl.load(x + wide * WIDTH + column, mask=inside[:, None] & (column < WIDTH), other=0.0)
    # One number for both: the larger value, and of equal ones the smaller column, is the larger key.
    key = (_in_order(number.to(tl.float32)).to(tl.int64) << 32) + (0x7FFFFFFF - column)
    least = -0x7FFFFFFFFFFFFFFF - 1
    key = tl.where(column < WIDTH, key, least)
    pick = tl.arange(0, BLOCK_PICKS)[None, :]
    picked = tl.full([ROWS, BLOCK_PICKS], least, tl.int64)
    for nth in tl.static_range(PICKS):
        largest = tl.max(key, axis=1)[:, None]
        picked = tl.where(pick == nth, largest, picked)
        key = tl.where(key == largest, least, key)
    at = wide * PICKS + pick
    stored = inside[:, None] & (pick < PICKS)
    bits = (picked >> 32).to(tl.int32)
    number = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(values + at, number.to(values.dtype.element_ty), mask=stored)
    tl.store(places + at, 0x7FFFFFFF - (picked & 0x7FFFFFFF).to(tl.int32), mask=stored)


@triton.jit
def gather_elements(
    x,
    places,
    y,
    n,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """y[.., j] = x[.., places[.., j]] for x [.., WIDTH] and places [.., COUNT]; 0 for a place outside."""
    index = block_index(BLOCK, WIDE)
    inside = index < decode(TOTAL, n)
    place = tl.load(places + index, mask=inside, other=0)
    found = inside & (place >= 0) & (place < WIDTH)
    value = tl.load(x + index // COUNT * WIDTH + place, mask=found, other=0.0).to(tl.float32)
    tl.store(y + index, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def mark_places(
    places,
    y,
    n,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """y [.., WIDTH] is one at each of places [.., COUNT], nothing elsewhere."""
    index = block_index(BLOCK, WIDE)
    inside = index < decode(TOTAL, n)
    mark = tl.zeros([BLOCK], tl.float32)
    for nth in tl.static_range(COUNT):
        place = tl.load(places + index // WIDTH * COUNT + nth, mask=inside, other=-1)
        mark = tl.where(place == index % WIDTH, 1.0, mark)
    tl.store(y + index, mark.to(y.dtype.element_ty), mask=inside)


@triton.jit
def combine_experts(outputs, weights, y, PICKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Block (t, j): columns [j * BLOCK, ...) of y [T, WIDTH], the sum over weights [T, PICKS] of outputs."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    acc = tl.zeros([BLOCK], tl.float32)
    for pick in tl.static_range(PICKS):
        weight = tl.load(weights + token * PICKS + pick).to(tl.float32)
        row = outputs + (token * PICKS + pick) * WIDTH
        acc += weight * tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * WIDTH + column, acc.to(y.dtype.element_ty), mask=inside)
