"""Machine code of mixtures of experts, of many small and of few large ones, compiled on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from castiron.plugins import Op, Operand, Quant
from castiron.plugins.cuda import experts, routing
from castiron.plugins.targets import TARGETS
from compiling import compiled, kernels_of, label
from test_compiled_quantized import RECIPES

LINEAR, GATED, QUANTIZED_LINEAR, QUANTIZED_GATED = experts.TACTICS
TOP_K = routing.TACTICS[0]
MATRIX = {"sm_90": "wgmma", "sm_100": "tcgen05"}


def down(n: int, k: int, count: int, picks: int) -> Op:
    """Back to the hidden size, a row for each of a token's experts."""
    inputs = (Operand("x", ("T", picks, k), "bf16"), Operand("ids", ("T", picks), "i32"))
    weights = (Operand("w", (count * n, k), constant=True), Operand("b", (count * n,), constant=True))
    result = (Operand("y", ("T", picks, n)),)
    return Op("castiron.ExpertLinear", (*inputs, *weights), result, {"experts": count})


def gate_up(n: int, k: int, count: int, picks: int) -> Op:
    inputs = (Operand("x", ("T", k), "bf16"), Operand("ids", ("T", picks), "i32"))
    weights = (Operand("g", (count * n, k), constant=True), Operand("u", (count * n, k), constant=True))
    result = (Operand("y", ("T", picks, n), "bf16"),)
    attrs = {"experts": count, "activation": "silu"}
    return Op("castiron.ExpertGatedLinear", (*inputs, *weights), result, attrs)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_products_of_experts_use_matrix_units_and_do_not_spill(target: str) -> None:
    device = TARGETS[target]
    kernels = [
        *kernels_of(LINEAR, down(2048, 768, 128, 8), device),
        *kernels_of(LINEAR, down(4096, 14336, 8, 2), device),
        *kernels_of(GATED, gate_up(768, 2048, 128, 8), device),
        *kernels_of(GATED, gate_up(14336, 4096, 8, 2), device),
    ]
    names = {kernel.function.__name__ for kernel in kernels}
    assert names == {"expert_stream", "expert_order", "expert_tile"}
    for kernel, code in compiled(kernels, target):
        name, used = f"{target} {label(kernel)}", code.resources
        assert used["spills"] == 0, name
        assert code.shared_bytes + used["static_shared_bytes"] <= device.shared_bytes, name
        if kernel.hot:
            streams = kernel.function.__name__ == "expert_stream"
            assert used["matrix"] == ("mma" if streams else MATRIX.get(target, "mma")), name
            # What is loaded beside the tiles, numbers of rows and biases, once each, is narrower.
            assert used["wide_loads"] >= 0.4 * used["global_loads"], name


def quantized(op: Op, recipe: str) -> Op:
    """``op`` with codes for weights."""
    format, group, x_format, x_group = RECIPES[recipe]
    quant = Quant(format, group, "f16" if format == "int4" else "f32")
    inputs = [
        o if o is None or not o.constant or len(o.shape) == 1 else replace(o, quant=quant) for o in op.inputs
    ]
    attrs = {**op.attrs, "x_format": x_format, "x_group": x_group, "x_scale": 0.0}
    return replace(op, inputs=tuple(inputs), attrs=attrs)


@pytest.mark.parametrize(
    ("recipe", "target"),
    [
        ("mxfp4", "sm_90"),
        ("fp8", "sm_89"),
        *(
            pytest.param(recipe, target, marks=pytest.mark.sweep)
            for recipe in RECIPES
            for target in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
        ),
    ],
)
def test_products_of_quantized_experts_do_so_too(recipe: str, target: str) -> None:
    device = TARGETS[target]
    kernels = [
        *kernels_of(QUANTIZED_LINEAR, quantized(down(2048, 768, 128, 8), recipe), device),
        *kernels_of(QUANTIZED_GATED, quantized(gate_up(768, 2048, 128, 8), recipe), device),
    ]
    hot = [kernel for kernel in kernels if kernel.hot]
    assert {k.function.__name__ for k in hot} == {"quantized_expert_stream", "quantized_expert_tile"}
    for kernel, code in compiled(hot, target):
        name, used = f"{recipe} on {target}: {label(kernel)} {code.resources}", code.resources
        assert used["spills"] == 0, name
        streams = kernel.function.__name__ == "quantized_expert_stream"
        assert used["matrix"] == ("mma" if streams else MATRIX.get(target, "mma")), name
        assert used["wide_loads"] > 0, name


def test_the_largest_of_a_wide_row_are_found_in_registers() -> None:
    for width, picks in ((128, 8), (512, 16), (4096, 32)):
        x, k = Operand("x", ("T", width)), Operand("k", (1,), "i32", constant=True)
        results = (Operand("v", ("T", picks)), Operand("i", ("T", picks), "i32"))
        kernels = kernels_of(TOP_K, Op("TopK", (x, k), results, {"axis": 1}), TARGETS["sm_80"])
        ((_, code),) = compiled(kernels, "sm_80")
        assert code.resources["spills"] == 0, width
