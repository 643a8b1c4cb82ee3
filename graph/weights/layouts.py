"""How packed rows become rows of codes: the building blocks of every layout that ``Unpack`` knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from castiron.errors import BuildError

from .formats import powers_of_two, values

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """How raw rows become rows of the result.

    Attributes:
        raw: the raw tensor's dtype names that are understood.
        decode: raw rows [n, C] -> [n * rows_out, C * columns_out / columns_in] of ``dtype``.
        dtype: of the result.
        rows_out: result rows from one raw row.
        columns_out, columns_in: how the row length changes; C is a multiple of ``columns_in``.
    """

    raw: tuple[str, ...]
    decode: Callable[[Array], Array]
    dtype: np.dtype[Any]
    rows_out: int = 1
    columns_out: int = 1
    columns_in: int = 1

    def shape(self, raw: Sequence[int]) -> tuple[int, int]:
        """Shape of the result for a raw shape; ``BuildError`` if that cannot be."""
        if len(raw) != 2 or raw[1] % self.columns_in:
            raise BuildError(
                f"found packed codes of shape {list(raw)}, expected a matrix with rows of a multiple of "
                f"{self.columns_in} elements"
            )
        return raw[0] * self.rows_out, raw[1] // self.columns_in * self.columns_out


def _across(bits: int, order: Sequence[int], bias: int = 0) -> Layout:
    """32-bit words of codes that are neighbours in a row.

    ``order[i]`` is the place, from the low bits, of a word's i-th code. ``bias`` is subtracted, which makes
    signed codes of unsigned ones.
    """

    def decode(raw: Array) -> Array:
        words = raw.view(np.uint32)
        codes = np.empty((*words.shape, len(order)), np.uint8)
        for index, place in enumerate(order):
            codes[..., index] = _field(words, bits, place)
        return _biased(codes, bias).reshape(len(words), -1)

    return Layout(("int32", "uint32"), decode, _code_dtype(bias), columns_out=len(order))


def _down(bits: int, bias: int = 0) -> Layout:
    """32-bit words of codes that are neighbours in a column, the lowest bits first."""
    count = 32 // bits

    def decode(raw: Array) -> Array:
        words = raw.view(np.uint32)
        codes = np.empty((len(words), count, words.shape[1]), np.uint8)
        for place in range(count):
            codes[:, place] = _field(words, bits, place)
        return _biased(codes, bias).reshape(-1, words.shape[1])

    return Layout(("int32", "uint32"), decode, _code_dtype(bias), rows_out=count)


def _field(words: Array, bits: int, place: int) -> Array:
    found: Array = words >> np.uint32(bits * place) & np.uint32((1 << bits) - 1)
    return found


def _biased(codes: Array, bias: int) -> Array:
    codes -= np.uint8(bias)  # wraps below zero: the byte is then the two's complement code
    return codes.view(_code_dtype(bias))


def _code_dtype(bias: int) -> np.dtype[Any]:
    return np.dtype(np.int8 if bias else np.uint8)


def _byte_pairs(raw: Array) -> Array:
    """Two codes a byte along the row, low nibble first."""
    codes = np.empty((*raw.shape, 2), np.uint8)
    codes[..., 0], codes[..., 1] = raw & 0xF, raw >> 4
    return codes.reshape(len(raw), -1)


def _row_pairs(raw: Array) -> Array:
    """Two's complement codes of two neighbouring rows a byte, low nibble: the even row."""
    codes = np.empty((len(raw), 2, raw.shape[1]), np.uint8)
    codes[:, 0], codes[:, 1] = raw & 0xF, raw >> 4
    return ((codes ^ np.uint8(8)) - np.uint8(8)).view(np.int8).reshape(-1, raw.shape[1])


_U8: Final = np.dtype(np.uint8)
_I8: Final = np.dtype(np.int8)
_F32: Final = np.dtype(np.float32)
#: Places of AWQ's eight codes in a word (AutoAWQ, gemm version).
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)

#: Layouts of the quantization tools. "uint" are zero points, as stored; "int" are signed codes.
TOOL_LAYOUTS: Final[dict[str, Layout]] = {
    "int4_words": _across(4, range(8), 8),
    "int8_words": _across(8, range(4), 128),
    "uint4_words": _across(4, range(8)),
    "uint8_words": _across(8, range(4)),
    "int4_words_awq": _across(4, _AWQ_ORDER, 8),
    "uint4_words_awq": _across(4, _AWQ_ORDER),
    "int4_words_down": _down(4, 8),
    "int8_words_down": _down(8, 128),
    "int4_row_pairs": Layout(("uint8",), _row_pairs, _I8, rows_out=2),
    "fp4_pairs": Layout(("uint8",), _byte_pairs, _U8, columns_out=2),
    "e4m3": Layout(("uint8",), lambda raw: values(raw, "fp8"), _F32),
    "e8m0": Layout(("uint8",), powers_of_two, _F32),
}
