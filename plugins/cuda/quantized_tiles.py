"""Tiles of quantized products: those of tiles.py for weights of 4 and 8 bits."""

from __future__ import annotations

from dataclasses import replace

from ..targets import Target
from .quantized_form import QuantizedForm
from .tiles import (
    STREAM_ROWS,
    Product,
    RowClass,
    StreamTile,
    Tile,
    row_classes,
    shared_bytes,
    stream_block_n,
)

#: Bytes of weights, and of x, that one stage fetches at most.
_STAGE_BYTES = 16 << 10
_WARPS = 4


def product_of(
    form: QuantizedForm, n: int, gated: bool, x_bytes: int, experts: int = 1, picks: int = 1
) -> Product:
    """The product as the cost model sees it."""
    rate = 1.0 if form.math == "half" else 2.0
    return Product(n, form.inputs, gated, x_bytes, form.w_bytes, rate, experts, picks)


def quantized_stream_tile(target: Target, product: Product, form: QuantizedForm) -> StreamTile:
    """As tiles.stream_tile, with steps inside one group of scales where sums are scaled."""
    # Beside picked rows more would spill: two sums of 32 rows on sm_89, one with int4 codes on sm_100, and on
    # sm_90 a fourth stage of float4 codes for two sums.
    picked = product.experts > 1
    block_n = 16 if picked else stream_block_n(target, product)
    small = target.shared_bytes < 128 << 10
    stages = 3 if small or (picked and product.gated) else 4
    stage = _STAGE_BYTES // 2 if small else _STAGE_BYTES
    of_weights = int(stage / (product.w_bytes * block_n * product.matrices))
    step = min(of_weights, stage // (STREAM_ROWS * product.x_bytes)) // _WARPS
    while step > form.least_step and step * _WARPS >= 2 * product.k:
        step //= 2
    most = form.most_step(form.scales)
    step = max(min(step, most) if most else step, form.least_step)
    step = 1 << (step.bit_length() - 1)
    return StreamTile(block_n, step, _WARPS, min(stages, 1 + -(-product.k // (step * _WARPS))))


def quantized_classes(
    target: Target, product: Product, form: QuantizedForm, max_rows: int
) -> tuple[RowClass, ...]:
    """The tiles of every row count from STREAM_ROWS + 1 to ``max_rows``."""
    return row_classes(target, product, max_rows, tuple(candidates(target, product, form)))


def scaled_classes(product: Product, max_rows: int) -> tuple[RowClass, ...]:
    """As quantized_classes, for products of float4 by float4: one instruction takes 64 inputs."""
    classes = []
    for low, end, block_m in ((STREAM_ROWS + 1, 64, 64), (65, max_rows, 128)):
        if low <= max_rows:
            tile = Tile(block_m, 128 // product.matrices, 256, 4 if block_m == 64 else 8, 3)
            classes.append(RowClass(low, min(end, max_rows), tile))
    return tuple(classes)


def candidates(target: Target, product: Product, form: QuantizedForm) -> list[Tile]:
    """Tiles whose accumulators fit the registers and whose stages fit the shared memory of a block.

    Weights are the rows of what the matrix unit computes; warpgroups take 64 of them at least.
    """
    deep = target.compute_capability in (90, 100)
    step = (128 if deep else 64) if form.packed or form.math != "half" else 64
    most = form.most_step(form.tile_scales)
    step = max(min(step, most) if most else step, form.least_step)
    # Sums that are scaled step by step need a second accumulator.
    twice = bool(most)
    shapes = [(32, 64, 4), (64, 64, 4), (64, 128, 4 if not twice else 8), (128, 64, 4 if not twice else 8)]
    if not (twice and form.x_scales == "sums"):
        shapes.append((128, 128, 8))
    if product.experts > 1:
        # Of 32 picked rows sm_80's code for int8 spills.
        shapes = shapes[1:]
        if target.compute_capability == 100 and form.math == "fp8" and twice and not product.gated:
            shapes = [
                (64, 64, 8)
            ]  # sm_100's for float8 with scaled sums, of larger tiles or with fewer warps
    found = []
    for block_m, columns, warps in shapes:
        block_n = max(columns // product.matrices, 64 if deep else 16)
        if block_n * product.matrices > columns and columns < 128:
            continue
        tile = Tile(block_m, block_n, step, warps, 4)
        while shared_bytes(tile, product) > target.shared_bytes - 4096 and tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        found.append(tile)
    return found
