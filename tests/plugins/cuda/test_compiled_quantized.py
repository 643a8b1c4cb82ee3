"""Machine code of products with quantized weights, and of attention over quantized caches.

All shapes: benchmarks/cuda_kernels.py. One small set runs by default, every architecture with `-m sweep`.
"""

from __future__ import annotations

from typing import Any

import pytest
from castiron.plugins import Op, Operand, Quant
from castiron.plugins.cuda.quantized_linear import TACTICS
from castiron.plugins.launch import TritonKernel
from castiron.plugins.targets import TARGETS
from compiling import compiled, kernels_of, label

LINEAR, GATED = TACTICS
#: What multiplies the tiles of many rows; quantized_stream is bound by memory and takes the instructions of
#: single warps everywhere.
MATRIX = {"sm_90": "wgmma", "sm_100": "tcgen05"}
#: By recipe: format and group of the weights, what x is rounded to, and in groups of how many.
RECIPES: dict[str, tuple[Any, int, str, int]] = {
    "int8-wo": ("int8", 0, "", 0),
    "int8-sq": ("int8", 0, "int8", 64),
    "int4-wo": ("int4", 32, "", 0),
    "int4 in groups of 128": ("int4", 128, "", 0),
    "fp8": ("fp8", 0, "fp8", 0),
    "fp8-block": ("fp8", 128, "fp8", 128),
    "nvfp4": ("fp4", 16, "nvfp4", 0),
    "mxfp4": ("fp4", 32, "", 0),
}


def kernels(recipe: str, target: str, *, gated: bool) -> list[TritonKernel]:
    format, group, x_format, x_group = RECIPES[recipe]
    n, k = (14336, 4096) if gated else (4096, 4096)
    names = ("gate", "up") if gated else ("w",)
    half = "f16" if format == "int4" else "f32"
    weights = [Operand(name, (n, k), constant=True, quant=Quant(format, group, half)) for name in names]  # type: ignore[arg-type]
    op = Op(
        "castiron.GatedLinear" if gated else "castiron.Linear",
        (Operand("x", ("T", k), "bf16"), *weights),
        (Operand("y", ("T", n), "bf16"),),
        {"activation": "silu" if gated else "none", "x_format": x_format, "x_group": x_group, "x_scale": 0.0},
    )
    return [
        kernel
        for kernel in kernels_of(GATED if gated else LINEAR, op, TARGETS[target])
        if "partials" not in kernel.types
    ]


def check(recipe: str, target: str, *, gated: bool) -> None:
    found = compiled(kernels(recipe, target, gated=gated), target)
    assert len(found) >= 2  # some recipes have one kernel for all rows
    for kernel, code in found:
        function = kernel.function.__name__
        name, used = f"{recipe} on {target}: {label(kernel)} {code.resources}", code.resources
        assert used["spills"] == 0, name
        assert code.shared_bytes + used["static_shared_bytes"] <= TARGETS[target].shared_bytes, name
        if function.startswith("quantize_"):
            continue
        streams = function == "quantized_stream"
        assert used["matrix"] == ("mma" if streams else MATRIX.get(target, "mma")), name
        # Inputs of float4 weights come in fours of 8 bytes; scales are narrower.
        assert used["wide_loads"] > 0, name
        if RECIPES[recipe][0] != "fp4" and not RECIPES[recipe][3]:
            assert used["wide_loads"] >= 0.45 * used["global_loads"], name


@pytest.mark.parametrize(
    ("recipe", "target"), [("int4-wo", "sm_90"), ("int8-sq", "sm_80"), ("fp8", "sm_89"), ("nvfp4", "sm_100")]
)
def test_quantized_products_use_matrix_units_and_wide_loads_and_do_not_spill(
    recipe: str, target: str
) -> None:
    check(recipe, target, gated=False)


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("gated", [False, True])
def test_as_above_for_every_recipe_and_architecture(recipe: str, target: str, gated: bool) -> None:
    check(recipe, target, gated=gated)
