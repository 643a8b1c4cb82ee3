"""The counts that are known only when a step runs, and how large they can be."""

from __future__ import annotations

from .program import Limits

#: Rows of one adapter that kernels take at a time: what matrix units fill anyway.
LORA_TILE = 16
#: Edits of logits (penalties, masked tokens) that a step may carry; more are made on the host.
MAX_EDITS = 65536


def largest_counts(limits: Limits, vocab_size: int, prefill_tile: int) -> dict[str, int]:
    """The most that each symbol can be (docs/cuda-program.md, "Symbols").

    ``prefill_tile``: rows of a query tile; 0 on host, whose programs know T and N alone.
    """
    if not prefill_tile:
        return {"T": limits.max_num_tokens, "N": limits.max_logit_rows}
    rows = limits.max_logit_rows
    return {
        "T": limits.max_num_tokens,
        "N": rows,
        "S": limits.max_batch_size,
        "D": limits.max_batch_size,
        "P": -(-limits.max_num_tokens // prefill_tile) + limits.max_batch_size,
        "R": rows,
        "E": MAX_EDITS,
        "L": rows,
        "V": vocab_size,
        "A": lora_tiles(limits.max_num_tokens, limits.max_batch_size),
        "B": lora_tiles(rows, limits.max_batch_size),
    }


def lora_tiles(rows: int, adapters: int) -> int:
    """Tiles that the rows of so many different adapters fill at most: each leaves one tile unfilled."""
    return (rows + (LORA_TILE - 1) * min(adapters, rows)) // LORA_TILE
