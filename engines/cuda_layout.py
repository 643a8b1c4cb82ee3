"""Where keys and values of a CUDA target's cache lie (docs/cuda-program.md, "KV cache")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .program import KvLayer

BLOCK_TOKENS = 32
_ALIGNMENT = 256
_ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}


@dataclass(frozen=True)
class KvLayout:
    """Byte offsets inside one block of the pool.

    Attributes:
        block_stride: bytes from one block to the next.
        k_offsets, v_offsets: of each layer's keys ``[kv_head][32][D]`` and values ``[kv_head][32][Dv]``.
    """

    block_stride: int
    k_offsets: tuple[int, ...]
    v_offsets: tuple[int, ...]


def kv_layout(layers: Sequence[KvLayer]) -> KvLayout:
    """The layout of a pool that serves all layers."""
    keys, values, end = [], [], 0
    for layer in layers:
        row = BLOCK_TOKENS * layer.kv_heads * _ITEM_BYTES[layer.dtype]
        keys.append(end)
        end += _aligned(row * layer.head_dim)
        values.append(end)
        end += _aligned(row * layer.v_head_dim)
    return KvLayout(end, tuple(keys), tuple(values))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
