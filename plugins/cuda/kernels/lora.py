"""LoRA adapters: y += alpha · (x · aᵀ) · bᵀ for the rows that have one, in tiles of rows of the same adapter.

Tile t adds the adapter in slot ``slots[t]`` (-1: none, the tile is padding) to the rows
``rows[16 t] ... rows[16 t + 15]`` (-1: no row). Slots lie ``slot_stride`` elements apart; in one,
``a`` [modules · RANK, inputs] and ``b`` [columns, RANK] of a product, whose columns are outputs of up to
three modules: those from ``second`` and ``third`` on belong to the second and the third.

A row's sums depend on nothing but the row and its adapter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lora_shrink(
    x,
    a,
    rows,
    slots,
    sums,
    x_stride,
    inputs,
    ranks,
    slot_stride,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    WARPS: tl.constexpr,
):
    """x · aᵀ of BLOCK_R of all ``ranks`` over PART inputs, into sums f32 [tiles, parts, TILE, ranks].

    As in linear_stream, the warps share a part: each takes its BLOCK_K of every WARPS * BLOCK_K inputs.
    """
    tile = tl.program_id(0)
    slot = tl.load(slots + tile)
    if slot < 0:
        return
    first = tl.program_id(1) * BLOCK_R
    part = tl.program_id(2)
    row = tl.load(rows + tile * TILE + tl.arange(0, TILE))[None, None, :]
    warp = tl.arange(0, WARPS)[:, None, None] * BLOCK_K
    k_of_a = warp + tl.arange(0, BLOCK_K)[None, None, :]
    k_of_x = warp + tl.arange(0, BLOCK_K)[None, :, None]
    rank = first + tl.arange(0, BLOCK_R)[None, :, None]
    a_tile = a + slot * slot_stride + rank * inputs + k_of_a
    x_tile = x + row.to(tl.int64) * x_stride + k_of_x
    acc = tl.zeros([WARPS, BLOCK_R, TILE], tl.float32)
    begin = part * PART
    for k in tl.range(begin, tl.minimum(begin + PART, inputs), WARPS * BLOCK_K):
        xs = tl.load(x_tile + k, mask=(row >= 0) & (k_of_x < inputs - k), other=0.0)
        matrix = tl.load(a_tile + k, mask=k_of_a < inputs - k, other=0.0)
        acc = tl.dot(matrix, xs.to(a.dtype.element_ty), acc)
    member = tl.arange(0, TILE)[None, :]
    rank = first + tl.arange(0, BLOCK_R)[:, None]
    at = (tile * tl.num_programs(2) + part).to(tl.int64) * TILE + member
    tl.store(sums + at * ranks + rank, tl.sum(acc, axis=0))


@triton.jit
def lora_expand(
    sums,
    b,
    rows,
    slots,
    y,
    columns,
    second,
    third,
    inputs,
    ranks,
    slot_stride,
    alpha,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
):
    """Add alpha · sums · bᵀ to BLOCK_N columns of y [.., columns].

    Parts of the inputs join in ascending order.
    """
    tile = tl.program_id(0)
    slot = tl.load(slots + tile)
    if slot < 0:
        return
    first = tl.program_id(1) * BLOCK_N
    last = tl.minimum(first + BLOCK_N, columns) - 1
    n = first + tl.arange(0, BLOCK_N)
    module_of_n = (n >= second).to(tl.int32) + (n >= third).to(tl.int32)
    member = tl.arange(0, TILE)[:, None]
    r = tl.arange(0, BLOCK_R)
    parts = tl.cdiv(inputs, PART)
    sums_of_tile = sums + (tile * parts).to(tl.int64) * TILE * ranks + member * ranks + r[None, :]
    b_tile = b + slot * slot_stride + n.to(tl.int64)[:, None] * RANK + r[None, :]
    acc = tl.zeros([TILE, BLOCK_N], tl.float32)
    first_module = (first >= second).to(tl.int32) + (first >= third).to(tl.int32)
    last_module = (last >= second).to(tl.int32) + (last >= third).to(tl.int32)
    for module in tl.range(first_module, last_module + 1):
        mine = (n < columns) & (module_of_n == module)
        for done in tl.static_range(0, RANK, BLOCK_R):
            shrunk = tl.zeros([TILE, BLOCK_R], tl.float32)
            for part in tl.range(0, parts):
                shrunk += tl.load(sums_of_tile + part * TILE * ranks + module * RANK + done)
            matrix = tl.load(b_tile + done, mask=mine[:, None], other=0.0)
            acc = tl.dot(shrunk.to(b.dtype.element_ty), matrix.T, acc)
    row = tl.load(rows + tile * TILE + member)
    inside = (row >= 0) & (n < columns)[None, :]
    at = y + row.to(tl.int64) * columns + n[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32) + alpha * acc
    tl.store(at, value.to(y.dtype.element_ty), mask=inside)
