"""Rounding to number formats, against ml_dtypes and against graph/fake_quant.py, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from castiron.calibration.activations import round_activations
from castiron.calibration.grids import GRIDS, power_of_two
from castiron.calibration.scales import weight_scales
from castiron.graph.fake_quant import fake_quantize

Array = np.ndarray[Any, Any]


def _numbers(seed: int = 0) -> Array:
    """Numbers of all magnitudes, all halves (where ties are), and the ends of the ranges."""
    rng = np.random.default_rng(seed)
    spread = rng.standard_normal(20000) * np.exp2(rng.integers(-14, 12, 20000))
    halves = np.arange(-600, 600) / 4
    ends = [0.0, -0.0, 448.0, 464.0, 465.0, 1e6, -1e6, 6.0, 5.0, 2.5, 0.25, 0.75, 2.0**-9, 2.0**-10, 3e-4]
    return np.concatenate([spread, halves, ends]).astype(np.float32)


def _ml_dtypes(x: Array, name: str) -> Array:
    dtype, top = {"fp8": (ml_dtypes.float8_e4m3fn, 448.0), "fp4": (ml_dtypes.float4_e2m1fn, 6.0)}[name]
    return np.clip(x, -top, top).astype(dtype).astype(np.float32)


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_floats_round_as_ml_dtypes_does(name: str) -> None:
    x = _numbers()
    found = GRIDS[name].round(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(found, _ml_dtypes(x, name))


@pytest.mark.parametrize(("name", "low", "high"), [("int8", -127, 127), ("int4", -8, 7)])
def test_integers_round_half_to_even_and_saturate(name: str, low: int, high: int) -> None:
    x = _numbers()
    found = GRIDS[name].round(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(found, np.clip(np.rint(x), low, high))


def test_codes_of_floats_are_the_bits_of_their_format() -> None:
    x = _numbers()
    fp8 = GRIDS["fp8"].codes(GRIDS["fp8"].round(torch.from_numpy(x))).numpy()
    np.testing.assert_array_equal(fp8, np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    fp4 = GRIDS["fp4"].codes(GRIDS["fp4"].round(torch.from_numpy(x))).numpy()
    np.testing.assert_array_equal(fp4, np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def test_powers_of_two_are_exact_down_to_the_smallest_e8m0() -> None:
    exponents = torch.arange(-127, 128)
    expected = np.array([2.0**e for e in range(-127, 128)], np.float64)
    np.testing.assert_array_equal(power_of_two(exponents).numpy().astype(np.float64), expected)


@pytest.mark.parametrize("width", [64, 72])
@pytest.mark.parametrize(
    ("x_format", "group", "scale"),
    [
        ("int8", 0, 0.0),
        ("int8", 32, 0.0),
        ("int8", 0, 0.037),
        ("fp8", 0, 0.0),
        ("fp8", 0, 0.011),
        ("fp8", 128, 0.0),
        ("nvfp4", 0, 0.0),
        ("nvfp4", 0, 0.0031),
        ("mxfp4", 0, 0.0),
        ("mxfp8", 0, 0.0),
    ],
)
def test_activations_round_as_the_definition_says(
    x_format: str, group: int, scale: float, width: int
) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((3, 7, width)) * np.exp2(rng.integers(-9, 9, (3, 7, 1)))).astype(np.float32)
    x[0, 0] = 0
    x[0, 1, :40] = 0
    x[1, 2, 5] = 3000.0
    found = round_activations(torch.from_numpy(x), x_format, group, scale)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.numpy(), fake_quantize(x, x_format, group, scale))


def test_mx_scales_of_weights_are_those_of_the_standard() -> None:
    # OCP MX 1.0, 6.3: the largest power of two in the block, divided by that of e2m1, 4
    weight = torch.tensor([[6.0, -1.0] + [0.1] * 30, [7.9, 0.0] + [0.0] * 30, [0.3] * 32])
    scale = weight_scales(weight, GRIDS["fp4"], 32, "e8m0").start(weight)
    np.testing.assert_array_equal(scale.numpy(), [[1.0], [1.0], [2.0**-4]])


def test_nvfp4_scales_of_weights_are_e4m3_under_one_factor() -> None:
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((24, 80)).astype(np.float32)
    scales = weight_scales(torch.from_numpy(weight), GRIDS["fp4"], 16, "nvfp4")
    found = scales.start(torch.from_numpy(weight)).numpy()
    over = np.float32(np.abs(weight).max()) / np.float32(448 * 6)
    blocks = np.abs(weight).reshape(24, 5, 16).max(-1) / np.float32(6) / over
    expected = blocks.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * over
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # two roundings of the factor apart
    assert float(np.abs(weight).max()) == pytest.approx(found.max() * 6, rel=1e-6)


def test_int4_scales_put_the_largest_weight_on_the_longer_side() -> None:
    weight = torch.tensor([[0.8, -0.1, 0.2, 0.3], [-0.8, 0.1, 0.2, 0.3]])
    scale = weight_scales(weight, GRIDS["int4"], 0, "float32").start(weight)
    np.testing.assert_allclose(scale.numpy(), [[-0.1], [0.1]], rtol=1e-6)
