"""How large a block of the KV cache is, on any target."""

from __future__ import annotations

from collections.abc import Sequence

from .cuda_layout import kv_layout
from .program import BLOCK_TOKENS, ITEM_BYTES, KvLayer, Program


def block_bytes(program: Program) -> int:
    """Bytes of one KV block over all layers (docs/program.md and docs/cuda-program.md)."""
    if program.prefill_tile:  # a CUDA target, whose layers are aligned
        return kv_layout(program.kv_layers).block_stride
    return packed_block_bytes(program.kv_layers)


def packed_block_bytes(layers: Sequence[KvLayer]) -> int:
    """Bytes of one KV block over all layers that lie without gaps, as on host."""
    return BLOCK_TOKENS * token_bytes(layers)


def token_bytes(layers: Sequence[KvLayer]) -> int:
    """Bytes of one token's keys and values over all layers."""
    return sum(
        layer.kv_heads * (layer.head_dim + layer.v_head_dim) * ITEM_BYTES[layer.dtype] for layer in layers
    )
