"""How large the KV cache and a block of it are, on any target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cuda_layout import kv_layout
from .program import BLOCK_TOKENS, ITEM_BYTES, KvLayer, Program


@dataclass(frozen=True)
class KvBlocks:
    """Bytes of a block of the KV cache, and what is kept apart (docs/batching.md, "Windows of some layers").

    Attributes:
        block_bytes: over all layers that are not kept apart.
        window_block_bytes: over those with a window of attention, where others see everything; 0: all layers
            lie together.
        window: tokens that a query sees in them at most.
    """

    block_bytes: int
    window_block_bytes: int = 0
    window: int = 0

    @property
    def together(self) -> int:
        """Bytes of a block over all layers."""
        return self.block_bytes + self.window_block_bytes


def kv_blocks(program: Program) -> KvBlocks:
    """The blocks of a program's cache (docs/program.md and docs/cuda-program.md)."""
    layers = program.kv_layers
    if program.prefill_tile:  # a CUDA target, whose layers are aligned
        layout = kv_layout(layers)
        size, window_size = layout.block_stride, layout.window_stride
    else:
        window_size = packed_block_bytes([layer for layer in layers if layer.window])
        size = packed_block_bytes(layers) - window_size
    return KvBlocks(size, window_size, max((layer.window for layer in layers), default=0))


def full_pool(program: Program) -> tuple[int, int]:
    """Blocks, and window blocks, of a cache for a full batch of requests of full length.

    0 window blocks: nothing is kept apart. The twin of ``choose_pool_size`` (cpp/kv/pool_size.h).
    """
    limits, sizes = program.limits, kv_blocks(program)
    each = -(-limits.max_seq_len // BLOCK_TOKENS)
    blocks = each * limits.max_batch_size
    if not sizes.window_block_bytes:
        return blocks, 0
    read = min(each, (max(sizes.window, 2) - 1) // BLOCK_TOKENS + 3)
    windows = read * limits.max_batch_size + limits.max_num_tokens // BLOCK_TOKENS + blocks // 8
    return blocks, windows if windows < blocks else 0


def packed_block_bytes(layers: Sequence[KvLayer]) -> int:
    """Bytes of one KV block over all layers that lie without gaps, as on host."""
    return BLOCK_TOKENS * token_bytes(layers)


def token_bytes(layers: Sequence[KvLayer]) -> int:
    """Bytes of one token's keys and values over all layers."""
    return sum(
        layer.kv_heads * (layer.head_dim + layer.v_head_dim) * ITEM_BYTES[layer.dtype] for layer in layers
    )
