"""Number formats of quantized weights against ml_dtypes and torch, which implement them independently."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from castiron.graph.weights import formats

#: Every float16 number: all values of the narrow formats, all points halfway between two, and much around.
HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
FINITE = HALVES[np.isfinite(HALVES)]


def test_fp8_codes_have_the_values_that_torch_gives_them() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(formats.values(codes, "fp8"), expected)


def test_fp4_codes_have_the_values_that_ml_dtypes_gives_them() -> None:
    codes = np.arange(16, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(formats.values(codes, "fp4"), expected)
    assert np.signbit(formats.values(codes, "fp4"))[8]  # -0 keeps its sign


def test_rounding_to_fp8_saturates_and_is_torchs_below_that() -> None:
    codes = formats.nearest(FINITE, "fp8")
    limited = torch.from_numpy(FINITE).clamp(-448, 448)
    expected = limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(codes, expected)
    assert formats.values(codes, "fp8").max() == 448


def test_rounding_to_fp4_is_that_of_ml_dtypes_with_saturation() -> None:
    expected = np.clip(FINITE, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(formats.nearest(FINITE, "fp4"), expected)


@pytest.mark.parametrize(("name", "low", "high"), [("int8", -128, 127), ("int4", -8, 7)])
def test_rounding_to_integers_ties_to_even_and_saturates(name: str, low: int, high: int) -> None:
    numbers = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1e9, -1e9, high + 0.4, low - 0.4], np.float32)
    expected = np.array([0, 2, 2, 0, -2, -2, high, low, high, low], np.int8)
    np.testing.assert_array_equal(formats.nearest(numbers, name), expected)
    np.testing.assert_array_equal(formats.values(expected, name), expected.astype(np.float32))


def test_e8m0_scales_are_those_of_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(formats.powers_of_two(codes), expected)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown weight format 'int3'"):
        formats.nearest(FINITE, "int3")
