# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Rounds rows of activations to few bits, as graph/fake_quant.py defines it: what quantized products read."""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import clamp, fp4_bits, fp8_bits, power_of_two, round_fp4, round_fp8, round_whole


@triton.jit
def _rounded(x, FORMAT: tl.constexpr):
    """The nearest number of the format, as float32."""
    if FORMAT == "int8":
        rounded = round_whole(clamp(x, 127.0))
    else:
        rounded = round_fp8(x)
    return rounded


@triton.jit
def _or_one(scale):
    """A scale that numbers can be divided by: all of them are 0 where it is."""
    return tl.where(scale > 0, scale, 1.0)


@triton.jit
def _mx_scale(largest, EMAX: tl.constexpr):
    """2^(floor(log2 largest) - EMAX) as e8m0 byte; of 0 the smallest."""
    return tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - EMAX, 0)


@triton.jit
def _store(at, rounded, mask):
    """Store exact numbers as int8, as bytes of float8, or in half precision."""
    KIND: tl.constexpr = at.dtype.element_ty
    if KIND.is_fp8():
        tl.store(at, fp8_bits(rounded).to(KIND, bitcast=True), mask=mask)
    else:
        tl.store(at, rounded.to(KIND), mask=mask)


@triton.jit
def quantize_rows(
    x,
    columns,
    codes,
    scales,
    x_stride,
    static_scale,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    STATIC: tl.constexpr,
    ROUND_ONLY: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
):
    """One row a program: x [T, K] to ``codes`` [T, STRIDE], zero behind K, and ``scales`` f32 [T, GROUPS].

    FORMAT: "int8", "fp8", "mxfp8", or "none", which only picks columns. GROUP inputs share a scale; STATIC:
    all of them ``static_scale``, and no scales are stored. ROUND_ONLY: store rounded numbers instead of codes
    and scales. HAS_COLUMNS: input j is x[columns[j]].
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, PADDED_GROUPS)
    member = tl.arange(0, PADDED_GROUP)[None, :]
    k = group[:, None] * GROUP + member
    inside = (member < GROUP) & (k < K)
    at = k
    if HAS_COLUMNS:
        at = tl.load(columns + k, mask=inside, other=0)
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if FORMAT != "none":
        if STATIC:
            scale = static_scale
            rounded = _rounded(tl.div_rn(value, scale), FORMAT)
        else:
            largest = tl.max(tl.abs(value), axis=1)
            if FORMAT == "mxfp8":
                scale = power_of_two(_mx_scale(largest, 8))
            else:
                scale = _or_one(tl.div_rn(largest, 127.0 if FORMAT == "int8" else 448.0))
            rounded = _rounded(tl.div_rn(value, scale[:, None]), FORMAT)
            if not ROUND_ONLY:
                tl.store(scales + row * GROUPS + group, scale, mask=group < GROUPS)
            scale = scale[:, None]
        value = rounded
        if ROUND_ONLY:
            value = rounded * scale
    # Groups that overlap the padding behind K store it; lanes behind a group have nothing to store.
    _store(codes + row * STRIDE + k, value, (member < GROUP) & (k < STRIDE))


@triton.jit
def quantize_fp4_rows(
    x,
    codes,
    block_scales,
    row_scales,
    x_stride,
    static_scale,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    STATIC: tl.constexpr,
    ROUND_ONLY: tl.constexpr,
):
    """One row a program: x [T, K] to float4 in blocks of GROUP: 16 is NVFP4, 32 MXFP4.

    codes: u8 [T, STRIDE], two codes a byte in layout "words" (engines/program.py). block_scales: u8
    [T, GROUPS], e4m3 or e8m0. row_scales: f32 [T], NVFP4's scale of the scales, if not STATIC. ROUND_ONLY:
    ``codes`` [T, STRIDE] are rounded numbers in half precision without the row's scale, in their own order,
    and there are no block scales.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, PADDED_GROUPS)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), axis=1)
    if GROUP == 16:
        if STATIC:
            over = static_scale
        else:
            over = _or_one(tl.div_rn(tl.max(largest, axis=0), 2688.0))
            tl.store(row_scales + row, over)
        inner = round_fp8(tl.div_rn(tl.div_rn(largest, 6.0), over))
        bits = fp8_bits(inner)
        scale = inner * over
    else:
        exponent = _mx_scale(largest, 2)
        bits = exponent.to(tl.uint8)
        inner = power_of_two(exponent)
        scale = inner
    rounded = round_fp4(tl.div_rn(value, _or_one(scale)[:, None]))
    rounded = tl.where(scale[:, None] > 0, rounded, 0.0)
    if ROUND_ONLY:
        numbers = (rounded * inner[:, None]).to(codes.dtype.element_ty)
        tl.store(codes + row * STRIDE + k, numbers, mask=k < STRIDE)
    else:
        # Input 8e + 4s + 2j + h of a run of 16 is half s of byte 4j + 2h + e.
        RUNS: tl.constexpr = PADDED_GROUPS * GROUP // 16
        halves = tl.permute(tl.reshape(fp4_bits(rounded), [RUNS, 2, 2, 2, 2]), [0, 3, 4, 1, 2])
        low, high = tl.split(tl.reshape(halves, [RUNS, 8, 2]))
        byte = tl.arange(0, RUNS)[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(codes + row * STRIDE + byte, (low | (high << 4)).to(tl.uint8), mask=byte < STRIDE)
        tl.store(block_scales + row * GROUPS + group, bits, mask=group < GROUPS)
