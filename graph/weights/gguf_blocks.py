"""Layouts of GGUF's quantized blocks: the codes, scales and offsets of a row of blocks (ggml-quants.c).

A block of ``width`` inputs holds its scales beside its codes, so each kind has up to three layouts over the
same raw bytes [N, blocks * block bytes]. Unsigned codes are shifted to signed ones; what that adds goes into
the offset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .layouts import Layout

Array = npt.NDArray[Any]

_F16: Final = np.dtype(np.float16)
_F32: Final = np.dtype(np.float32)


@dataclass(frozen=True)
class BlockKind:
    """One GGUF type: a block of ``width`` inputs in ``nbytes`` bytes, a scale for each ``group`` inputs.

    ``decode`` gives codes, scales and offsets (or None) of blocks [m, nbytes]: [m, width], [m, width/group].
    Scales that are stored as float16 are given as float16.
    """

    format: str
    width: int
    nbytes: int
    group: int
    decode: Callable[[Array], tuple[Array, Array, Array | None]]
    has_offset: bool = False
    scale_dtype: np.dtype[Any] = _F32


def _halves(blocks: Array, first: int, count: int = 1) -> Array:
    """``count`` float16 numbers from byte ``first``."""
    return np.ascontiguousarray(blocks[:, first : first + 2 * count]).view(np.float16)


def _nibbles(packed: Array, run: int) -> Array:
    """Low nibbles of ``run`` bytes, then their high nibbles, and so on: [m, 2 * bytes]."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([runs & 0xF, runs >> 4], 2).reshape(len(packed), -1)


def _signed(codes: Array, middle: int) -> Array:
    return (codes - np.uint8(middle)).view(np.int8)


def _q4_0(blocks: Array) -> tuple[Array, Array, Array | None]:
    return _signed(_nibbles(blocks[:, 2:], 16), 8), _halves(blocks, 0), None


def _q4_1(blocks: Array) -> tuple[Array, Array, Array | None]:
    scale, least = np.split(_halves(blocks, 0, 2), 2, 1)
    return (
        _signed(_nibbles(blocks[:, 4:], 16), 8),
        scale,
        least.astype(np.float32) + 8 * scale.astype(np.float32),
    )


def _fifth_bits(blocks: Array, first: int) -> Array:
    """Bit 4 of 32 codes, whose bits lie in four bytes: [m, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, first : first + 4]), axis=1, bitorder="little")
    return bits << 4


def _q5_0(blocks: Array) -> tuple[Array, Array, Array | None]:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2)
    return _signed(codes, 16), _halves(blocks, 0), None


def _q5_1(blocks: Array) -> tuple[Array, Array, Array | None]:
    scale, least = np.split(_halves(blocks, 0, 2), 2, 1)
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4)
    return _signed(codes, 16), scale, least.astype(np.float32) + 16 * scale.astype(np.float32)


def _q8_0(blocks: Array) -> tuple[Array, Array, Array | None]:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0), None


def _six_bit_scales(blocks: Array) -> tuple[Array, Array]:
    """Scale and minimum of the eight groups of a Q4_K or Q5_K block, [m, 8] each."""
    d, d_min = np.split(_halves(blocks, 0, 2).astype(np.float32), 2, 1)
    packed = blocks[:, 4:16]
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, rest & 0xF | low >> 6 << 4], 1)
    minima = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], 1)
    return d * scales, d_min * minima


def _q4_k(blocks: Array) -> tuple[Array, Array, Array | None]:
    scale, minimum = _six_bit_scales(blocks)
    return _signed(_nibbles(blocks[:, 16:], 32), 8), scale, np.float32(8) * scale - minimum


def _q5_k(blocks: Array) -> tuple[Array, Array, Array | None]:
    scale, minimum = _six_bit_scales(blocks)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = blocks[:, None, 16:48] >> shifts & 1  # bit g of byte i: input i of group g
    codes = _nibbles(blocks[:, 48:], 32) | fifth.reshape(len(blocks), -1) << 4
    return _signed(codes, 16), scale, np.float32(16) * scale - minimum


def _q6_k(blocks: Array) -> tuple[Array, Array, Array | None]:
    low = _nibbles(blocks[:, :128], 64)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> shifts & 3
    codes = low | high.reshape(len(blocks), -1) << 4
    scale = _halves(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    return _signed(codes, 32), scale, None


#: By GGUF type name.
BLOCK_KINDS: Final[dict[str, BlockKind]] = {
    "Q4_0": BlockKind("int4", 32, 18, 32, _q4_0, scale_dtype=_F16),
    "Q4_1": BlockKind("int4", 32, 20, 32, _q4_1, has_offset=True, scale_dtype=_F16),
    "Q5_0": BlockKind("int8", 32, 22, 32, _q5_0, scale_dtype=_F16),
    "Q5_1": BlockKind("int8", 32, 24, 32, _q5_1, has_offset=True, scale_dtype=_F16),
    "Q8_0": BlockKind("int8", 32, 34, 32, _q8_0, scale_dtype=_F16),
    "Q4_K": BlockKind("int4", 256, 144, 32, _q4_k, has_offset=True),
    "Q5_K": BlockKind("int8", 256, 176, 32, _q5_k, has_offset=True),
    "Q6_K": BlockKind("int8", 256, 210, 16, _q6_k),
}


def _layout(kind: BlockKind, part: int) -> Layout:
    def decode(raw: Array) -> Array:
        blocks = np.ascontiguousarray(raw).reshape(-1, kind.nbytes)
        found = kind.decode(blocks)[part]
        assert found is not None  # an "offsets" layout exists only for kinds that have them
        return found.reshape(len(raw), -1)

    columns = kind.width // (kind.group if part else 1)
    dtypes = (np.dtype(np.int8), kind.scale_dtype, _F32)
    return Layout(("uint8",), decode, dtypes[part], columns_out=columns, columns_in=kind.nbytes)


#: "q4_k_codes", "q4_k_scales", "q4_k_offsets" and so on.
GGUF_LAYOUTS: Final[dict[str, Layout]] = {
    f"{name.lower()}_{part}": _layout(kind, index)
    for name, kind in BLOCK_KINDS.items()
    for index, part in enumerate(("codes", "scales", "offsets"))
    if index < 2 or kind.has_offset
}
