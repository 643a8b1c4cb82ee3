"""What the codes of a quantized weight mean: exact values, and rounding to the nearest.

int8 and int4 are two's complement integers; fp8 is e4m3fn (OCP 8-bit Floating Point 1.0), fp4 is e2m1 and
e8m0 a power of two (OCP Microscaling Formats 1.0). One code a byte whatever its width.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

E4M3_MAX: Final = 448.0
#: The eight magnitudes of e2m1 by code; bit 3 is the sign.
E2M1_MAGNITUDES: Final = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)

#: Value of every fp8 and fp4 code, float32; the upper half of a byte that holds an fp4 code is not used.
_TABLES: Final[dict[str, npt.NDArray[np.float32]]] = {
    "fp8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "fp4": np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES]),
}
#: Smallest and largest code of the integer formats.
_RANGES: Final[dict[str, tuple[int, int]]] = {"int8": (-128, 127), "int4": (-8, 7)}
#: Halfway points between neighbouring magnitudes of e2m1. A tie goes to the even code (mantissa bit 0), so
#: the odd-numbered points belong to the code above them.
_E2M1_MIDDLES: Final = (E2M1_MAGNITUDES[1:] + E2M1_MAGNITUDES[:-1]) / 2

#: By exponent byte. The smallest is below the normal range of float32, the last is not a number.
_POWERS_OF_TWO: Final = np.array([*np.ldexp(1.0, np.arange(-127, 128)), np.nan], np.float32)

#: dtype of the codes of each format, one a byte.
CODE_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "int8": np.dtype(np.int8),
    "int4": np.dtype(np.int8),
    "fp8": np.dtype(np.uint8),
    "fp4": np.dtype(np.uint8),
}


def values(codes: Array, format: str) -> npt.NDArray[np.float32]:
    """The exact numbers behind codes (of ``CODE_DTYPES[format]``), a new float32 array."""
    if format in _RANGES:
        return codes.astype(np.float32)
    found: npt.NDArray[np.float32] = _TABLES[format][codes]
    return found


def nearest(numbers: Array, format: str) -> Array:
    """Codes of the nearest representable numbers, ties to even, saturated at the ends of the range."""
    numbers = np.asarray(numbers, np.float32)
    if format in _RANGES:
        low, high = _RANGES[format]
        return np.clip(np.rint(numbers), low, high).astype(np.int8)
    if format == "fp8":
        limited = np.clip(numbers, -E4M3_MAX, E4M3_MAX)
        codes: Array = limited.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return codes
    if format == "fp4":
        return _nearest_e2m1(numbers)
    raise ValueError(f"unknown weight format {format!r}; known are {', '.join(CODE_DTYPES)}")


def _nearest_e2m1(numbers: Array) -> Array:
    magnitudes = np.abs(numbers)
    codes = np.zeros(numbers.shape, np.uint8)
    for lower, middle in enumerate(_E2M1_MIDDLES):
        codes += magnitudes >= middle if lower % 2 else magnitudes > middle
    codes |= np.signbit(numbers).astype(np.uint8) << np.uint8(3)
    return codes


def powers_of_two(exponents: Array) -> npt.NDArray[np.float32]:
    """e8m0 scales: 2^(e - 127), float32, for bytes ``e``; 255 is not a number."""
    if exponents.dtype != np.uint8:
        raise ValueError(f"e8m0 scales are bytes, found {exponents.dtype}")
    found: npt.NDArray[np.float32] = _POWERS_OF_TWO[exponents]
    return found
