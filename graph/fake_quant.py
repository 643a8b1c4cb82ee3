"""What rounding activations to a format means, on numpy arrays: the reference of every device's kernels.

Definitions: int8 and fp8 by a scale that maps the largest magnitude to 127 and 448; NVFP4 and the MX formats
as published (OCP Microscaling Formats 1.0; NVIDIA's NVFP4: e2m1 in blocks of 16 with e4m3 scales under one
float32 scale).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_E4M3: Final = np.dtype(ml_dtypes.float8_e4m3fn)
_E2M1: Final = np.dtype(ml_dtypes.float4_e2m1fn)
INT8_MAX: Final = 127.0
E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0
#: Inputs that share a scale in the block formats.
NVFP4_GROUP: Final = 16
MX_GROUP: Final = 32
#: Exponent of the largest power of two of an element format: MX scales are 2^(floor(log2 amax) - this).
_MX_EMAX: Final = {"mxfp4": 2, "mxfp8": 8}


def round_int8(x: Array) -> Array:
    """Nearest integer, ties to even, within ±127."""
    return np.clip(np.rint(x), -INT8_MAX, INT8_MAX).astype(np.float32)


def round_e4m3(x: Array) -> Array:
    """Nearest float8 e4m3fn, ties to even, saturated at ±448."""
    return np.clip(x, -E4M3_MAX, E4M3_MAX).astype(np.float32).astype(_E4M3).astype(np.float32)


def round_e2m1(x: Array) -> Array:
    """Nearest float4 e2m1, ties to even, saturated at ±6."""
    return np.clip(x, -E2M1_MAX, E2M1_MAX).astype(np.float32).astype(_E2M1).astype(np.float32)


def fake_quantize(x: Array, x_format: str = "", x_group: int = 0, x_scale: float = 0.0) -> Array:
    """``x`` [.., K] rounded to a format and back, float32.

    ``x_group`` inputs share a scale (0: the row's) where the format leaves that open. ``x_scale`` is the
    static scale of the tensor (nvfp4: the global one); 0: the scale follows from the largest magnitude.
    """
    if not x_format:
        return x
    x = np.asarray(x, np.float32)
    if x_format == "int8":
        return _scaled(x, round_int8, INT8_MAX, x_group, x_scale)
    if x_format == "fp8":
        return _scaled(x, round_e4m3, E4M3_MAX, x_group, x_scale)
    if x_format == "nvfp4":
        return _nvfp4(x, x_scale)
    if x_format in _MX_EMAX:
        return _mx(x, x_format)
    raise ValueError(f"unknown activation format {x_format!r}")


def _scaled(x: Array, rounded: Callable[[Array], Array], largest: float, group: int, scale: float) -> Array:
    if scale:
        return rounded(x / np.float32(scale)) * np.float32(scale)
    blocks, width = _blocks(x, group or x.shape[-1])
    scales = _nonzero(np.abs(blocks).max(-1, keepdims=True) / np.float32(largest))
    return _flat(rounded(blocks / scales) * scales, x.shape, width)


def _nvfp4(x: Array, scale: float) -> Array:
    blocks, width = _blocks(x, NVFP4_GROUP)
    largest = np.abs(blocks).max(-1, keepdims=True)
    if scale:
        over = np.full((1, 1), scale, np.float32)
    else:
        over = _nonzero(largest.max(-2, keepdims=True) / np.float32(E4M3_MAX * E2M1_MAX))
    scales = round_e4m3(largest / np.float32(E2M1_MAX) / over) * over
    values = np.where(scales > 0, round_e2m1(blocks / _nonzero(scales)) * scales, np.float32(0))
    return _flat(values, x.shape, width)


def _mx(x: Array, x_format: str) -> Array:
    blocks, width = _blocks(x, MX_GROUP)
    largest = np.abs(blocks).max(-1, keepdims=True)
    exponent = np.frexp(largest)[1] - 1 - _MX_EMAX[x_format]  # frexp: largest = m * 2^e, 0.5 <= m < 1
    scales = np.ldexp(np.float32(1), np.clip(exponent, -127, 127)).astype(np.float32)
    rounded = round_e2m1 if x_format == "mxfp4" else round_e4m3
    return _flat(np.where(largest > 0, rounded(blocks / scales) * scales, np.float32(0)), x.shape, width)


def _blocks(x: Array, group: int) -> tuple[Array, int]:
    """``x`` [.., K] as [.., ceil(K/group), group], zero-padded, and the padded width."""
    width = -(-x.shape[-1] // group) * group
    padded = np.zeros((*x.shape[:-1], width), np.float32)
    padded[..., : x.shape[-1]] = x
    return padded.reshape(*x.shape[:-1], -1, group), width


def _flat(blocks: Array, shape: tuple[int, ...], width: int) -> Array:
    return np.ascontiguousarray(blocks.reshape(*shape[:-1], width)[..., : shape[-1]], np.float32)


def _nonzero(scales: Array) -> Array:
    return np.where(scales > 0, scales, np.float32(1)).astype(np.float32)
