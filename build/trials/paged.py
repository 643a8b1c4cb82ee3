"""A small step over a paged cache, for tactics that read one: two decoding sequences and a prefill chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ...engines.cuda_layout import KvLayout, kv_layout
from ...engines.program import BLOCK_TOKENS, KvLayer
from ...plugins.paged_step import PagedStep

Array = np.ndarray[Any, Any]
#: (rows, tokens before them): a cache that ends inside a block, an empty one, a chunk across a border.
_SEQUENCES = ((1, 40), (1, 0), (11, 30))
MAX_SEQ_LEN = 64
_SPARE_BLOCKS = 2


@dataclass(frozen=True)
class PagedCase:
    """The step's arrays by their names in docs/cuda-program.md, padding included, and the pool's bytes.

    ``step``: the same for references. ``layout``: where the one layer lies.
    """

    inputs: dict[str, Array]
    pool: Array
    layout: KvLayout
    step: PagedStep


def paged_case(kv_heads: int, head_dim: int, v_head_dim: int, random: np.random.Generator) -> PagedCase:
    """A step whose cache holds random keys and values, and NaN wherever no sequence has a token."""
    layout = kv_layout([KvLayer(kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, dtype="bf16")])
    inputs = _step_inputs()
    blocks = int(inputs["block_table"].max()) + 1 + _SPARE_BLOCKS
    parts = []
    for width in (head_dim, v_head_dim):
        part = np.full((blocks, kv_heads, BLOCK_TOKENS, width), np.nan, ml_dtypes.bfloat16)
        for sequence, length in enumerate(inputs["kv_len"]):
            for position in range(length):
                block = inputs["block_table"][sequence, position // BLOCK_TOKENS]
                token = random.standard_normal((kv_heads, width)).astype(ml_dtypes.bfloat16)
                part[block, :, position % BLOCK_TOKENS] = token
        parts.append(part)
    pool = np.full((blocks, layout.block_stride), 0xFF, np.uint8)
    for part, offset in zip(parts, (layout.k_offsets[0], layout.v_offsets[0]), strict=True):
        rows = part.reshape(blocks, -1).view(np.uint8)
        pool[:, offset : offset + rows.shape[1]] = rows
    step = PagedStep(
        inputs["slots"], inputs["query_start"], inputs["kv_len"], inputs["block_table"], parts[0], parts[1]
    )
    return PagedCase(inputs, pool, layout, step)


def _step_inputs() -> dict[str, Array]:
    positions: list[int] = []
    slots: list[int] = []
    starts, table = [0], np.zeros((len(_SEQUENCES), MAX_SEQ_LEN // BLOCK_TOKENS), np.int32)
    next_block = 1  # block 0 is in nobody's use
    for sequence, (rows, before) in enumerate(_SEQUENCES):
        held = -(-(rows + before) // BLOCK_TOKENS)
        # Backwards, so that a kernel that takes neighbouring blocks for consecutive ones shows it.
        blocks = list(range(next_block, next_block + held))[::-1]
        table[sequence, :held] = blocks
        next_block += held
        starts.append(starts[-1] + rows)
        positions += range(before, before + rows)
        slots += [
            blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(before, before + rows)
        ]
    arrays = {
        "token_ids": [0] * len(positions),
        "positions": positions,
        "slots": slots,
        "query_start": starts,
        "kv_len": [rows + before for rows, before in _SEQUENCES],
        "decode_seq": [s for s, (rows, _) in enumerate(_SEQUENCES) if rows == 1] + [-1],
        "tile_seq": [s for s, (rows, _) in enumerate(_SEQUENCES) if rows > 1] + [-1],
        "tile_row": [0, 0],
    }
    found = {name: np.array(array, np.int32) for name, array in arrays.items()}
    found["block_table"] = table
    return found
