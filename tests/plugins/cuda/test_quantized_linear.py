"""Products with quantized weights, their launches in the Triton interpreter, against float64.

Expected values come from the definitions: codes times scales, and x rounded by graph/fake_quant.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from castiron.plugins import Context, Op, Operand, Quant
from castiron.plugins.targets import TARGETS
from quantized import LIMITS, LINEAR, Outcome, run

#: Where codes meet x as they are, only float32 sums round: some k ** 0.5 steps of numbers of about one.
EXACT = 4e-6
#: Weights are scaled in half precision: the scale rounds, then the product.
HALF = {"bf16": 2.0**-8, "f16": 2.0**-11}


def check(outcome: Outcome, k: int, rounding: float = 0.0) -> None:
    """A sum of k products, each off by ``rounding`` at random, is off by k ** 0.5 of it; six times is out.

    SwiGLU multiplies two such sums, of which one may be k ** 0.5 itself.
    """
    error = np.abs(outcome.y.double().numpy() - outcome.expected)
    size = np.abs(outcome.expected).mean()
    assert (error <= (6 * rounding + EXACT) * max(k**0.5, 6 * size)).all(), error.max()


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize(
    ("format", "group", "options", "scaled_in_half"),
    [
        ("int8", 0, {}, False),
        ("int8", 32, {"f16": True}, True),
        ("int8", 16, {"offset": True}, True),
        ("int4", 128, {}, True),
        ("int4", 32, {"f16": True}, True),
        ("int4", 64, {"offset": True, "columns": True}, True),
        ("int4", 0, {}, False),
        ("fp8", 0, {}, False),
        ("fp8", 128, {"target": "sm_80"}, True),
        ("fp4", 16, {}, False),
        ("fp4", 32, {"half": "f16"}, False),
        ("fp4", 64, {"half": "f16"}, True),
    ],
    ids=str,
)
def test_codes_are_multiplied_by_inputs_in_half_precision(
    rows: int, format: str, group: int, options: dict[str, Any], scaled_in_half: bool
) -> None:
    outcome = run(rows, 40, 200, format, group, **options)
    kernel = "quantized_stream" if rows <= 16 else "quantized_tile"
    assert outcome.ran == [*(["quantize_rows"] if "columns" in options else []), kernel]
    check(outcome, 200, HALF[options.get("half", "bf16")] if scaled_in_half else 0.0)


@pytest.mark.parametrize("rows", [2, 18])
@pytest.mark.parametrize(
    ("format", "group", "x_format", "options"),
    [
        ("int8", 0, "int8", {}),
        ("int8", 0, "int8", {"x_scale": 0.03}),
        ("int8", 64, "int8", {"x_group": 64}),
        ("fp8", 0, "fp8", {}),
        ("fp8", 0, "fp8", {"x_scale": 0.01}),
        ("fp8", 128, "fp8", {"x_group": 128}),
        ("fp8", 0, "fp8", {"target": "sm_86"}),
        ("fp4", 16, "nvfp4", {}),
        ("fp4", 16, "nvfp4", {"x_scale": 0.002, "half": "f16"}),
        ("fp4", 32, "mxfp4", {}),
        ("fp4", 32, "mxfp8", {}),
    ],
    ids=str,
)
def test_rounded_inputs_multiply_codes_exactly(
    rows: int, format: str, group: int, x_format: str, options: dict[str, Any]
) -> None:
    outcome = run(rows, 40, 272, format, group, x_format=x_format, **options)
    check(outcome, 272)


@pytest.mark.parametrize("rows", [3, 20, 100])
@pytest.mark.parametrize(
    ("group", "x_format", "options"),
    [
        (16, "nvfp4", {"target": "sm_100"}),
        (16, "nvfp4", {"target": "sm_120", "x_scale": 0.002, "gated": True, "activation": "silu"}),
        (32, "mxfp4", {"target": "sm_100", "half": "f16", "bias": True, "residual": True}),
    ],
    ids=str,
)
def test_float4_meets_float4_under_scales_of_blocks(
    rows: int, group: int, x_format: str, options: dict[str, Any]
) -> None:
    outcome = run(rows, 40, 300, "fp4", group, x_format=x_format, **options)
    assert outcome.ran == ["quantize_fp4_rows", "scaled_tile" if rows > 16 else "quantized_stream"]
    check(outcome, 300)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("x_format", ["int8", "fp8"])
def test_weights_of_4_bits_take_inputs_of_8(rows: int, x_format: str) -> None:
    check(run(rows, 24, 160, "int4", 128, x_format=x_format), 160, 0.0 if rows == 1 else HALF["bf16"])


@pytest.mark.parametrize("rows", [2, 40])
def test_gated_products_with_biases(rows: int) -> None:
    options: dict[str, Any] = {"gated": True, "bias": True, "activation": "silu"}
    check(run(rows, 40, 192, "int4", 64, f16=True, columns=True, **options), 192, HALF["bf16"])
    check(run(rows, 40, 192, "int8", 0, x_format="int8", **options), 192)


@pytest.mark.parametrize("rows", [5, 33])
def test_the_epilogue_comes_after_the_scales(rows: int) -> None:
    outcome = run(rows, 33, 100, "int8", 0, bias=True, residual=True, activation="silu", alpha=0.5)
    check(outcome, 100)


def test_parts_of_k_are_scaled_before_they_are_added() -> None:
    outcome = run(20, 32, 3000, "int8", 0, x_format="int8", bias=True, residual=True)
    assert outcome.ran == ["quantize_rows", "quantized_tile", "linear_reduce"]
    check(outcome, 3000)


@pytest.mark.parametrize("seed", range(10))
def test_random_products_on_random_targets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = {"int8": [0, 128], "int4": [32, 128], "fp8": [0, 128], "fp4": [16, 32]}
    format = str(rng.choice(list(groups)))
    group = int(rng.choice(groups[format]))
    x_formats = {"int8": ["", "int8"], "int4": ["", "int8", "fp8"], "fp8": ["", "fp8"]}
    choices: dict[str, Any] = {
        "target": str(rng.choice(["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_80"])),
        "half": str(rng.choice(["bf16", "f16"])),
        "x_format": str(rng.choice(x_formats.get(format, ["", "nvfp4" if group == 16 else "mxfp4"]))),
        "bias": bool(rng.random() < 0.5),
        "residual": bool(rng.random() < 0.5),
    }
    rows, n, k = int(rng.choice([1, 16, 17, 70])), int(rng.integers(1, 150)), int(rng.integers(1, 400))
    print(f"seed {seed}: {rows} x {n} x {k}, {format} in groups of {group}, {choices}")
    # Inputs that are rounded once more, to half, count too.
    check(run(rows, n, k, format, group, seed=seed, **choices), k, HALF[choices["half"]])


def test_what_no_kernel_takes_is_left_to_the_dense_product() -> None:
    def accepted(quant: Quant | None, **attrs: Any) -> bool:
        x, w = Operand("x", ("T", 96), "bf16"), Operand("w", (8, 96), constant=True, quant=quant)
        op = Op("castiron.Linear", (x, w), (Operand("y", ("T", 8)),), attrs)
        return LINEAR.accepts(op, Context(TARGETS["sm_90"], "bf16", LIMITS))

    assert accepted(Quant("int4", 32))
    assert not accepted(None)
    assert not accepted(Quant("int4", 16))  # a run of a word's inputs has one scale
    assert not accepted(Quant("int4", 48))
    sorted_codes = Quant("int8", 32, columns=tuple(reversed(range(96))))
    assert accepted(sorted_codes)
    assert accepted(sorted_codes, x_format="int8")
    assert not accepted(sorted_codes, x_format="int8", x_group=32)  # groups of x are not those of the codes
