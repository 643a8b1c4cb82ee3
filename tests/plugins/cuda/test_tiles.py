"""The choice of tiles: complete, within the limits of each GPU, and guided by what bounds a product."""

from __future__ import annotations

import itertools

import pytest
from castiron.plugins.cuda.tiles import (
    STREAM_ROWS,
    Product,
    Tile,
    candidates,
    row_classes,
    seconds,
    shared_bytes,
    stream_tile,
)
from castiron.plugins.targets import TARGETS, Target

GPUS = [target for target in TARGETS.values() if target.family == "cuda"]
SHAPES = [(960, 576), (576, 1536), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (33, 25)]
PRODUCTS = [
    Product(n, k, gated, x_bytes)
    for (n, k), gated, x_bytes in itertools.product(SHAPES, (False, True), (2, 4))
]


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_every_row_count_has_exactly_one_tile(target: Target) -> None:
    for product, most in itertools.product(PRODUCTS, (1, 16, 17, 64, 100, 256, 257, 8192)):
        classes = row_classes(target, product, most)
        expected = STREAM_ROWS + 1
        for row_class in classes:
            assert row_class.low == expected
            assert row_class.high >= row_class.low
            expected = row_class.high + 1
        assert expected == max(most, STREAM_ROWS) + 1


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_tiles_fit_a_block_s_shared_memory(target: Target) -> None:
    for product in PRODUCTS:
        assert candidates(target, product)
        for tile in candidates(target, product):
            assert tile.stages >= 2
            assert shared_bytes(tile, product) < target.shared_bytes
        tile = stream_tile(target, product)
        row_bytes = STREAM_ROWS * product.x_bytes + tile.block_n * product.matrices * 2
        assert tile.warps * tile.block_k * row_bytes * tile.stages < target.shared_bytes


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_streaming_blocks_fill_the_device_where_the_weights_allow_it(target: Target) -> None:
    for product in PRODUCTS:
        tile = stream_tile(target, product)
        blocks = -(-product.n // tile.block_n)
        assert tile.block_n == 16 or blocks >= 0.75 * target.multiprocessors


def test_only_narrow_and_deep_products_are_split() -> None:
    target = TARGETS["sm_90"]
    assert all(c.tile.splits == 1 for c in row_classes(target, Product(128256, 4096), 8192))
    assert all(c.tile.splits == 1 for c in row_classes(target, Product(14336, 4096, True), 8192))
    middle = row_classes(target, Product(4096, 14336), 8192)[0]
    assert middle.tile.splits > 1
    # 64 rows at least must keep each part of K deep enough to hide the latency of memory.
    assert 14336 / middle.tile.splits >= 4 * middle.tile.block_k


def test_many_rows_are_never_split_and_take_large_tiles() -> None:
    for target in GPUS:
        last = row_classes(target, Product(14336, 4096), 8192)[-1].tile
        assert last.splits == 1
        assert last.block_m * last.block_n >= 128 * 128


def test_tma_needs_rows_of_whole_16_bytes_in_half_on_sm_90_or_100() -> None:
    def uses(name: str, product: Product) -> bool:
        return any(tile.tma for tile in candidates(TARGETS[name], product))

    assert uses("sm_90", Product(4096, 4096))
    assert uses("sm_100", Product(4096, 4096, True))
    assert not uses("sm_90", Product(4096, 4100))
    assert not uses("sm_90", Product(4096, 4096, x_bytes=4))
    assert not any(uses(name, Product(4096, 4096)) for name in ("sm_80", "sm_89", "sm_120", "compute_80"))


def test_the_estimate_never_beats_the_roofline() -> None:
    for target, product, rows in itertools.product(GPUS, PRODUCTS, (17, 256, 2048)):
        for tile in candidates(target, product):
            work = product.n * product.k * product.matrices
            floor = max(2.0 * work / target.bandwidth, 2.0 * rows * work / target.matrix_flops)
            assert seconds(target, product, rows, tile) >= floor


def test_an_estimate_by_hand() -> None:
    # 64 rows, 4096 x 4096 on an H200: 64 blocks of 64 x 64, each 16 steps of 256 inputs.
    tile = Tile(64, 64, 256, 4, 3)
    target, product = TARGETS["sm_90"], Product(4096, 4096)
    memory = (2 * 4096 * 4096 + 64 * (4096 * 2 + 4096 * 4)) / 4.8e12
    latency = (4096 / 256 / 2 + 1) * 0.7e-6
    compute = 2 * 64 * 64 * 4096 / (989e12 / 132 * 0.85 * 32 / 48)
    # Each block reads 64 rows of x and 64 of the weights through L2, at 1.5 times the memory's speed.
    cache = 64 * 4096 * (64 + 64) * 2 / 7.2e12
    assert seconds(target, product, 64, tile) == pytest.approx(max(memory, latency, compute, cache))
