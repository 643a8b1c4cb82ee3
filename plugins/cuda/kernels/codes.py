# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Numbers of a few bits: from codes to half precision, and from float32 to codes, by integer arithmetic.

It is the same on every architecture; sm_80 has no conversions of 8-bit floats. Formats: "int8"; "int4", held
as code + 8; "fp8", float8 e4m3fn; "fp4", float4 e2m1.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Adding and subtracting it rounds to whole numbers, ties to even: 1.5 * 2^23.
_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def _in_order(pairs, HALF: tl.constexpr):
    """Words [.., W] of two numbers in half precision, the first one low, as numbers [.., 2 W]."""
    low = pairs.to(tl.uint16).to(HALF, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(HALF, bitcast=True)
    both = tl.join(low, high)
    RANK: tl.constexpr = len(pairs.shape)
    if RANK == 2:
        result = tl.reshape(both, [pairs.shape[0], 2 * pairs.shape[1]])
    else:
        result = tl.reshape(both, [pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]])
    return result


@triton.jit
def decoded_part(words, PART: tl.constexpr, FORMAT: tl.constexpr, HALF: tl.constexpr):
    """A quarter of the numbers in ``words`` [.., W] of 4-bit codes, [.., 2 W], exact in HALF.

    Half bytes PART and PART + 4 of a word, in the order of layout "words" (engines/program.py). Bits of a
    small float, shifted into place, are those of a number that is too small by a power of two; a whole number
    is put behind a number whose last bits count ones.
    """
    IS_F16: tl.constexpr = HALF == tl.float16  # noqa: SIM300
    if FORMAT == "int4":
        BASE: tl.constexpr = 0x64006400 if IS_F16 else 0x43004300
        pairs = ((words >> (4 * PART)) & 0x000F000F) | BASE
        numbers = _in_order(pairs, HALF) - tl.full([], 1032.0 if IS_F16 else 136.0, HALF)
    else:
        tl.static_assert(FORMAT == "fp4", "unknown format")
        sign = (words << (12 - 4 * PART)) & 0x80008000
        SHIFT: tl.constexpr = (9 if IS_F16 else 6) - 4 * PART
        if SHIFT > 0:
            size = words << SHIFT
        else:
            size = words >> -SHIFT
        pairs = sign | (size & (0x0E000E00 if IS_F16 else 0x01C001C0))
        numbers = _in_order(pairs, HALF) * tl.full([], 16384.0 if IS_F16 else 2.0**126, HALF)
    return numbers


@triton.jit
def decoded(codes, FORMAT: tl.constexpr, HALF: tl.constexpr):
    """The numbers that codes of a byte each stand for, exact in HALF (bfloat16 or float16)."""
    if FORMAT == "int8" or codes.dtype.is_fp8():
        numbers = codes.to(HALF)
    else:
        tl.static_assert(FORMAT == "fp8", "unknown format")
        IS_F16: tl.constexpr = HALF == tl.float16  # noqa: SIM300
        bits = codes.to(tl.uint16)
        moved = (bits & 0x80) << 8 | (bits & 0x7F) << (7 if IS_F16 else 4)
        numbers = moved.to(HALF, bitcast=True) * tl.full([], 256.0 if IS_F16 else 2.0**120, HALF)
    return numbers


@triton.jit
def power_of_two(exponent_bits):
    """2^(b - 127) in float32 of the e8m0 byte b; b = 255, which means NaN, gives infinity."""
    bits = exponent_bits.to(tl.int32)
    return tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_whole(x):
    """The nearest whole number, ties to even, of numbers below 2^22."""
    return (x + _WHOLE) - _WHOLE


@triton.jit
def clamp(x, LARGEST: tl.constexpr):
    """x within ±LARGEST."""
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def round_fp8(x):
    """The nearest float8 e4m3fn as float32, ties to even, saturated at ±448."""
    x = clamp(x, 448.0)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2^-6 numbers are multiples of 2^-9.
    MULTIPLES: tl.constexpr = _WHOLE / 512
    return tl.where(tl.abs(x) < 0.015625, (x + MULTIPLES) - MULTIPLES, normal)


@triton.jit
def fp8_bits(x):
    """The byte of a number that is a float8 e4m3fn."""
    bits = x.to(tl.int32, bitcast=True)
    small = (tl.abs(x) * 512.0).to(tl.int32)
    size = tl.where(tl.abs(x) < 0.015625, small, ((bits & 0x7FFFFFFF) >> 20) - 960)
    return (((bits >> 24) & 0x80) | size).to(tl.uint8)


@triton.jit
def round_fp4(x):
    """The nearest float4 e2m1 as float32, ties to even, saturated at ±6."""
    x = clamp(x, 6.0)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) & -0x400000).to(tl.float32, bitcast=True)
    # Below 1 numbers are multiples of a half.
    MULTIPLES: tl.constexpr = _WHOLE / 2
    return tl.where(tl.abs(x) < 1.0, (x + MULTIPLES) - MULTIPLES, normal)


@triton.jit
def fp4_bits(x):
    """The code, 0 to 15, of a number that is a float4 e2m1, as int32."""
    bits = x.to(tl.int32, bitcast=True)
    small = (tl.abs(x) * 2.0).to(tl.int32)
    size = tl.where(tl.abs(x) < 1.0, small, ((bits & 0x7FFFFFFF) >> 22) - 252)
    return ((bits >> 28) & 8) | size
