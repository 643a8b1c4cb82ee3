"""A step over the paged cache as references see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_BLOCK = 32


@dataclass(frozen=True)
class PagedStep:
    """The step inputs that cache ops read (docs/cuda-program.md), and one layer of the pool.

    Attributes:
        slots: i32 [T]. query_start: i32 [S + 1]. kv_len: i32 [S]. block_table: i32 [S, blocks].
        k, v: [pool blocks, kv heads, 32, width] in any dtype; written in place.
    """

    slots: Array
    query_start: Array
    kv_len: Array
    block_table: Array
    k: Array
    v: Array

    def store(self, part: Array, rows: Array) -> None:
        """Store rows [T, kv heads * width] in ``part`` by slot."""
        heads = np.asarray(rows).reshape(len(rows), part.shape[1], part.shape[3])
        for row, slot in enumerate(self.slots):
            if slot >= 0:
                part[slot // _BLOCK, :, slot % _BLOCK] = heads[row].astype(part.dtype)

    def held(self, part: Array, seq: int) -> Array:
        """What the cache holds of a sequence: float64 [kv heads, kv_len, width]."""
        length = int(self.kv_len[seq])
        blocks = part[self.block_table[seq][: -(-length // _BLOCK)]].astype(np.float64)
        rows: Array = blocks.transpose(1, 0, 2, 3).reshape(part.shape[1], -1, part.shape[3])
        return rows[:, :length]
