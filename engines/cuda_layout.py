"""Where keys and values of a CUDA target's cache lie (docs/cuda-program.md, "KV cache")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .program import BLOCK_TOKENS, ITEM_BYTES, KvLayer, Program
from .symbols import LORA_TILE, largest_counts

#: Of each array of the step's input block.
INPUT_ALIGNMENT = 16
#: Of each part of a block of the cache, and of a slot for adapters.
PART_ALIGNMENT = 256


@dataclass(frozen=True)
class KvLayout:
    """Byte offsets inside one block of a pool.

    Attributes:
        block_stride: bytes from one block to the next.
        k_offsets, v_offsets: of each layer's keys ``[kv_head][32][D]`` and values ``[kv_head][32][Dv]``.
        layers: what lies there.
        window_stride: ``block_stride`` of the layers with a window, whose blocks are a pool of their own.
    """

    block_stride: int
    k_offsets: tuple[int, ...]
    v_offsets: tuple[int, ...]
    layers: tuple[KvLayer, ...]
    window_stride: int = 0

    def stride_of(self, layer: int) -> int:
        """Bytes from one block of a layer to the next."""
        return self.window_stride if self.layers[layer].window else self.block_stride


def kv_layout(layers: Sequence[KvLayer]) -> KvLayout:
    """The layout of a pool that serves all layers, or all but those with a window, and of theirs."""
    keys, values, ends = [], [], {False: 0, True: 0}
    for layer in layers:
        row, apart = BLOCK_TOKENS * layer.kv_heads * ITEM_BYTES[layer.dtype], layer.window > 0
        keys.append(ends[apart])
        ends[apart] += aligned(row * layer.head_dim)
        values.append(ends[apart])
        ends[apart] += aligned(row * layer.v_head_dim)
    return KvLayout(ends[False], tuple(keys), tuple(values), tuple(layers), ends[True])


def step_input_bytes(program: Program) -> int:
    """Bytes of the block that one step uploads at most (docs/cuda-program.md, "Step inputs")."""
    most = largest_counts(program.limits, program.vocab_size, program.prefill_tile)
    blocks = -(-program.limits.max_seq_len // BLOCK_TOKENS)
    # token_ids, positions, slots, token_source; tile_seq, tile_row; the others of one kind each
    counts = [most["T"]] * (4 if program.feeding else 3) + [most["P"]] * 2
    counts += [most["N"], most["S"] + 1, most["S"], most["S"] * blocks, most["D"]]
    if any(layer.window for layer in program.kv_layers):
        counts += [most["T"], most["S"] * blocks]
    if program.adapters is not None:
        counts += [size * most[tiles] for tiles in "AB" for size in (LORA_TILE, 1)]
    return sum(-(-4 * count // INPUT_ALIGNMENT) * INPUT_ALIGNMENT for count in counts)


def aligned(size: int) -> int:
    """``size`` rounded up to where the next part begins."""
    return -(-size // PART_ALIGNMENT) * PART_ALIGNMENT
