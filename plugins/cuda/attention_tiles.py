"""Tile sizes of the attention kernels by target and head size, within registers and shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..targets import Target


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
    """Tiles for padded head sizes; rows divide ``tile_rows``, the rows of a step's query tile."""
    return PrefillTiles(min(64, tile_rows), 64, 4, 2)


def decode_tiles(target: Target, width: int, v_width: int, item_bytes: int, group: int) -> DecodeTiles:
    """Tiles for ``group`` query heads of a KV head."""
    heads = max(16, 1 << (group - 1).bit_length())
    return DecodeTiles(heads, 64, 4, 5)
