"""Tile sizes of the attention kernels by target and head size, within registers and shared memory.

Chosen on machine code (tests/plugins/cuda/test_compiled_attention.py): the largest tiles without a spill.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..targets import Target

#: Stages of the software pipeline: the tile that is multiplied, and one on its way.
_STAGES = 3


@dataclass(frozen=True)
class PrefillTiles:
    """Query rows and keys of a tile."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DecodeTiles:
    """Query heads (of one KV head) and keys of a tile."""

    heads: int
    keys: int
    num_warps: int
    num_stages: int


def prefill_tiles(target: Target, width: int, v_width: int, item_bytes: int, tile_rows: int) -> PrefillTiles:
    """Tiles for padded head sizes; rows divide ``tile_rows``, the rows of a step's query tile.

    A thread of 8 warps holds rows * v_width / 256 sums, half as many scores and the queries as operands:
    128 rows fit its 255 registers up to 128 columns, and up to 256 where the matrix unit reads queries from
    shared memory (sm_90) or keeps sums to itself (sm_100).
    """
    widest = max(width, v_width)
    if item_bytes == 4:
        # Float32 goes through the ordinary units, which hold every operand in registers.
        return PrefillTiles(min(32, tile_rows), 32, 4, 1)
    own_operands = target.compute_capability in (90, 100)
    rows = min(128 if widest <= 128 or own_operands else 64, tile_rows)
    keys = 64 if widest <= 128 else 32
    num_warps = 8 if rows >= 64 else 4
    # Caches of a byte meet queries and weights in half precision.
    operand_bytes = max(2, item_bytes)
    # Warps take 16 rows each; with fewer, several share a row and exchange its weights.
    exchange = rows * keys * operand_bytes if rows < 16 * num_warps else 0
    tiles = (_STAGES - 1) * _tile_bytes(keys, width, v_width, item_bytes)
    if item_bytes == 1:
        tiles += _tile_bytes(keys, width, v_width, operand_bytes)
    fits = rows * width * operand_bytes + tiles + exchange <= target.shared_bytes
    return PrefillTiles(rows, keys, num_warps, _STAGES if fits else _STAGES - 1)


def decode_tiles(target: Target, width: int, v_width: int, item_bytes: int, group: int) -> DecodeTiles:
    """Tiles for ``group`` query heads of a KV head.

    Reading is all that counts: two tiles on their way in each of three blocks a multiprocessor, or as many as
    fit, cover the latency of memory (40 KB in flight at 5 TB/s, 132 multiprocessors and a microsecond).
    """
    heads = max(16, 1 << (group - 1).bit_length())
    in_flight = (_STAGES - 1) * _tile_bytes(64, width, v_width, item_bytes)
    keys = 64 if 3 * in_flight <= target.shared_bytes else 32
    if item_bytes == 4:
        return DecodeTiles(heads, 32, 4, 1)
    # Of a cache of bytes a tile is half as large: one more on its way makes up for some of it.
    stages = _STAGES + 1 if item_bytes == 1 else _STAGES
    return DecodeTiles(heads, keys, 8 if heads >= 64 else 4, stages)


def _tile_bytes(keys: int, width: int, v_width: int, item_bytes: int) -> int:
    return keys * (width + v_width) * item_bytes
