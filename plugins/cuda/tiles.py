"""Which tile a matrix product takes: a pure function of target, rows and weights, by a small cost model.

Products fall into classes by rows. Up to 16 rows the time is that of reading the weights, and `linear_stream`
does it; above, `linear_tile` or, on sm_90 and sm_100, `linear_tma` with the tile that the model below finds
fastest for the class's most rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..targets import Target

#: Rows that linear_stream takes at most: the smallest that matrix units fill anyway.
STREAM_ROWS = 16
#: Ends of the classes of linear_tile; the last class is open, and 2048 rows stand for it.
_CLASS_ENDS = (64, 256)
_MANY_ROWS = 2048
_SPLITS = (1, 2, 4, 8)
#: Bytes of weights that linear_stream has one stage fetch: enough in flight with two blocks a multiprocessor.
_STAGE_BYTES = 16 << 10
_LAUNCH = 2e-6
_LATENCY = 0.7e-6


@dataclass(frozen=True)
class Product:
    """What is multiplied: x [rows, k], ``x_bytes`` an element, by weights [n, k], or [2n, k] if ``gated``.

    ``w_bytes`` of a weight; ``rate``: multiplications at a time, as a multiple of those in half precision.
    ``experts``: so many matrices of this size, of which each row picks ``picks``.
    """

    n: int
    k: int
    gated: bool = False
    x_bytes: int = 2
    w_bytes: float = 2.0
    rate: float = 1.0
    experts: int = 1
    picks: int = 1

    @property
    def matrices(self) -> int:
        """Weight rows for each column of the result."""
        return 2 if self.gated else 1


@dataclass(frozen=True)
class StreamTile:
    """Of linear_stream: a block's weight rows, and each warp's inputs at a time."""

    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tile:
    """Of linear_tile or linear_tma: the result's block, inputs at a time, the parts that K is cut into.

    Attributes:
        tma: fetched by the tensor memory accelerator, by blocks that stay for several tiles.
        specialize: warps that fetch apart from warps that multiply (with ``tma`` only).
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1
    tma: bool = False
    specialize: bool = False


@dataclass(frozen=True)
class RowClass:
    """A tile and the rows that it serves, both ends included."""

    low: int
    high: int
    tile: Tile


def stream_block_n(target: Target, product: Product) -> int:
    """The most weight rows a block with which the blocks still fill the device.

    More rows a block means that x is read less often; too few blocks leave multiprocessors idle, which
    three quarters of them can just make up for (a multiprocessor reads up to 64 bytes a cycle). One token has
    blocks for each of its experts, who share few rows of x.
    """
    sizes = (32, 16) if product.gated or product.experts > 1 else (64, 32, 16)
    blocks = [-(-product.n // size) * product.picks for size in sizes]
    fitting = [s for s, count in zip(sizes, blocks, strict=True) if count >= 0.75 * target.multiprocessors]
    return fitting[0] if fitting else 16


def stream_tile(target: Target, product: Product) -> StreamTile:
    """The tile for few rows."""
    block_n = stream_block_n(target, product)
    small = target.shared_bytes < 128 << 10
    warps, stages = 4, 3 if small else 5
    chunk = _STAGE_BYTES // (2 * block_n * product.matrices) // (2 if small else 1)
    if product.x_bytes == 4:
        chunk //= 2
    # Not more than the inputs there are, and at least 16 for each warp's instruction.
    while chunk > 16 * warps and chunk >= 2 * product.k:
        chunk //= 2
    block_k = max(chunk // warps, 16)
    # More stages than steps would only take shared memory from other blocks.
    stages = min(stages, 1 + -(-product.k // (block_k * warps)))
    return StreamTile(block_n, block_k, warps, stages)


@lru_cache(1024)  # a layer asks several times, and all layers ask the same
def row_classes(
    target: Target, product: Product, max_rows: int, tiles: tuple[Tile, ...] = ()
) -> tuple[RowClass, ...]:
    """The tiles of every row count from STREAM_ROWS + 1 to ``max_rows``, of ``tiles`` or of all there are.

    A class that loses next to nothing with the tile of the one below joins it: one kernel less to compile.
    """
    classes: list[RowClass] = []
    low = STREAM_ROWS + 1
    for end in (*_CLASS_ENDS, max_rows):
        high = min(end, max_rows)
        if high < low:
            continue
        rows = min(high, _MANY_ROWS)
        tile = _best(target, product, rows, tiles, may_split=end in _CLASS_ENDS and product.experts == 1)
        below = classes[-1].tile if classes else None
        # Parts of K are summed through memory that holds every row of the class, so such a class stays small.
        if below is not None and below.splits == 1 and _as_fast(target, product, rows, below, tile):
            classes[-1] = RowClass(classes[-1].low, high, below)
        else:
            classes.append(RowClass(low, high, tile))
        low = high + 1
    return tuple(classes)


def _as_fast(target: Target, product: Product, rows: int, tile: Tile, best: Tile) -> bool:
    """Whether ``tile`` costs at most a tenth, or a quarter of a launch, more than the best one."""
    allowed = 1.1 * seconds(target, product, rows, best) + _LAUNCH / 4
    return seconds(target, product, rows, tile) <= allowed


def seconds(target: Target, product: Product, rows: int, tile: Tile) -> float:
    """Estimated time: the slowest of matrix units, memory, L2 and latency, and what splitting adds."""
    matrices = product.matrices
    columns = tile.block_n * matrices
    rows *= product.picks
    used = min(rows, product.experts)
    blocks = used * -(-rows // (used * tile.block_m)) * -(-product.n // tile.block_n) * tile.splits
    depth = -(-product.k // tile.splits)
    # Large tiles load less from shared memory for each product, which keeps the matrix units busy.
    intensity = tile.block_m * columns / (tile.block_m + columns)
    peak = target.matrix_flops * product.rate / target.multiprocessors * 0.85 * intensity / (intensity + 16)
    turns = -(-blocks // target.multiprocessors)
    compute = turns * 2.0 * tile.block_m * columns * depth / peak
    memory = product.w_bytes * product.n * matrices * product.k * used
    memory += rows * (product.k * product.x_bytes + product.n * 4.0)
    cache = blocks * depth * (tile.block_m * product.x_bytes + columns * product.w_bytes)
    cache_bandwidth = max(target.multiprocessors * 45e9, 1.5 * target.bandwidth)
    resident = max(1, target.shared_bytes // shared_bytes(tile, product))
    waves = -(-blocks // (target.multiprocessors * resident))
    latency = waves * (depth / tile.block_k / (tile.stages - 1) + 1) * _LATENCY
    split = 0.0
    if tile.splits > 1:
        split = _LAUNCH + 8.0 * tile.splits * rows * product.n * matrices / cache_bandwidth
    return max(compute, memory / target.bandwidth, cache / cache_bandwidth, latency) + split


def shared_bytes(tile: Tile, product: Product) -> int:
    """Shared memory of a block: each stage holds a part of x and of the weights."""
    row_bytes = tile.block_m * product.x_bytes + tile.block_n * product.matrices * product.w_bytes
    return int(tile.stages * tile.block_k * row_bytes)


def candidates(target: Target, product: Product) -> list[Tile]:
    """Tiles whose accumulators fit the registers and whose stages fit the shared memory of a block."""
    # Warpgroup and tensor-memory instructions (sm_90, sm_100) want deep stages of 128-byte rows.
    deep = target.compute_capability in (90, 100)
    k = 64 if deep else 32
    shapes = [(64, 32, 2 * k, 4), (64, 64, 2 * k, 4), (64, 128, k, 4), (128, 64, k, 4), (128, 128, k, 8)]
    # Rows that are picked have addresses of their own, which do not fit beside 128 × 256 results on sm_100.
    if deep and (product.gated or product.experts == 1):
        shapes.append((128, 256, k, 8))
    found = []
    for block_m, columns, block_k, warps in shapes:
        tile = Tile(block_m, columns // product.matrices, block_k, warps, 4)
        while shared_bytes(tile, product) > target.shared_bytes - 1024:  # barriers and alignment
            tile = replace(tile, stages=tile.stages - 1)
        # At equal cost the first is taken: copies by the accelerator take no registers and no instructions.
        if deep and columns >= 128 and block_m == 128 and fits_tma(product):
            # On sm_90 Triton's specialisation is younger than on sm_100; with two accumulators it spills.
            specialize = target.compute_capability == 100 and not product.gated
            found.append(replace(tile, tma=True, specialize=specialize))
        found.append(tile)
    return found


def fits_tma(product: Product) -> bool:
    """Whether tiles can be fetched by TMA: rows start at multiples of 16 bytes, and nothing is converted."""
    return product.x_bytes == 2 and product.k % 8 == 0 and product.experts == 1


def _best(target: Target, product: Product, rows: int, tiles: Sequence[Tile], may_split: bool) -> Tile:
    options = [
        replace(tile, splits=splits)
        for tile in tiles or candidates(target, product)
        for splits in (_SPLITS if may_split and not tile.tma else (1,))
        if splits == 1 or splits * 4 * tile.block_k <= product.k
    ]
    return min(options, key=lambda tile: seconds(target, product, rows, tile))
