"""Scales of float4 blocks in the byte that matrix units take: e4m3 under a scale of the row, or e8m0."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from castiron.errors import BuildError

from ..graph.weights.formats import nearest, values

Array = npt.NDArray[Any]

#: What a row's largest scale may be in e4m3: one for each mantissa, as large as it gets, so that the others
#: have all the room below.
_LARGEST: Final = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)
#: A product of an e4m3 number and the row's scale, and the division that undoes it, round once each.
_TOLERANCE: Final = 2.0**-22


def e4m3_scales(scales: Array) -> tuple[Array, Array]:
    """float32 scales [n, G] as bytes of e4m3 [n, G] and one float32 factor a row [n]; exact to 2⁻²².

    The scales of NVFP4 are such products, but the factor is known no longer: of the eight that the largest
    scale of a row allows, the first that makes e4m3 numbers of all others is as good as the original.
    Raises BuildError when a row has none.
    """
    scales = np.asarray(scales, np.float32)
    largest = scales.max(axis=1)
    largest = np.where(largest > 0, largest, np.float32(448.0))
    codes = np.zeros(scales.shape, np.uint8)
    factors = np.zeros(len(scales), np.float32)
    open_rows = np.arange(len(scales))
    for top in _LARGEST:
        factor = (largest[open_rows] / np.float32(top)).astype(np.float32)
        wanted = scales[open_rows]
        found = nearest(wanted / factor[:, None], "fp8")
        error = np.abs(values(found, "fp8") * factor[:, None] - wanted)
        fits = (error <= _TOLERANCE * np.abs(wanted)).all(axis=1)
        codes[open_rows[fits]], factors[open_rows[fits]] = found[fits], factor[fits]
        open_rows = open_rows[~fits]
        if not len(open_rows):
            return codes, factors
    raise BuildError(
        f"found {len(open_rows)} rows of float4 weights in blocks of 16 whose scales are no e4m3 numbers "
        "under one factor, as NVFP4's are; expected the block scales of an NVFP4 checkpoint or recipe"
    )


def e8m0_scales(scales: Array) -> Array:
    """float32 powers of two [n, G] as bytes of e8m0. Raises BuildError when one is no power of two."""
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    smallest = bits == 0x00400000  # 2^-127, which float32 holds without its leading bit
    if np.any(((bits & 0x807FFFFF) != 0) & ~smallest) or np.any(bits == 0x7F800000):
        raise BuildError(
            "found float4 weights in blocks of 32 whose scales are no powers of two, as those of MXFP4 are; "
            "expected the scales of an MXFP4 checkpoint or recipe"
        )
    return (bits >> 23).astype(np.uint8)
