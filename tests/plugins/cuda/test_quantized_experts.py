"""Products with picked quantized matrices, their launches in the Triton interpreter, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from castiron.graph.fake_quant import fake_quantize
from castiron.plugins import Op, Operand
from castiron.plugins.cuda.experts import TACTICS
from interpret import TORCH
from quantized import Weights, run_op
from test_quantized_linear import EXACT, HALF

LINEAR, GATED = TACTICS[2:]
EXPERTS, PICKS, N, K = 5, 2, 40, 128


def run(
    tokens: int,
    format: str,
    group: int,
    *,
    gated: bool = False,
    shared_x: bool = True,
    bias: bool = False,
    target: str = "sm_90",
    half: Any = "bf16",
    x_format: str = "",
    x_group: int = 0,
    x_scale: float = 0.0,
    columns: bool = False,
    k: int = K,
    **how: Any,
) -> tuple[list[str], float]:
    """The kernels that ran, and the largest error over that of one rounding step of each product."""
    rng = np.random.default_rng(tokens)
    names = ("gate", "up") if gated else ("w",)
    weights = [Weights.random(rng, EXPERTS * N, k, format, group, columns=columns, **how) for _ in names]
    biases = [rng.standard_normal(EXPERTS * N).astype(np.float32) for _ in names] if bias else []
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :PICKS]
    shape = (k,) if shared_x else (PICKS, k)
    op = Op(
        (GATED if gated else LINEAR).kind,
        (
            Operand("x", ("T", *shape), half),
            Operand("ids", ("T", PICKS), "i32"),
            *(
                Operand(name, (EXPERTS * N, k), constant=True, quant=w.quant)
                for name, w in zip(names, weights, strict=True)
            ),
            *(Operand(f"{name}.b", (EXPERTS * N,), constant=True) for name in names if bias),
        ),
        (Operand("y", ("T", PICKS, N)),),
        {"experts": EXPERTS, "x_format": x_format, "x_group": x_group, "x_scale": x_scale}
        | ({"activation": "silu"} if gated else {}),
    )
    x = torch.from_numpy(rng.standard_normal((tokens, *shape))).to(TORCH[half])
    tensors = {"x": x, "ids": torch.from_numpy(ids.astype(np.int32))}
    tensors["y"] = torch.full((tokens, PICKS, N), torch.nan)
    tactic = GATED if gated else LINEAR
    ran = run_op(tactic, op, tensors, weights, biases, {"T": tokens}, target, half)
    rounded = fake_quantize(x.float().numpy(), x_format, x_group, x_scale).astype(np.float64)
    given = [*(w.numbers() for w in weights), *biases]
    attrs = {"activation": "silu"} if gated else {}
    expected = tactic.reference(rounded, ids, *given, experts=EXPERTS, **attrs)[0]  # type: ignore[misc]
    error = np.abs(tensors["y"].double().numpy() - expected)
    return ran, float(error.max() / max(k**0.5, 6 * np.abs(expected).mean()))


@pytest.mark.parametrize("tokens", [1, 6, 20])
@pytest.mark.parametrize(
    ("format", "group", "options", "scaled_in_half"),
    [
        ("int8", 0, {"gated": True}, False),
        ("int8", 32, {"f16": True, "shared_x": False}, True),
        ("int4", 64, {"offset": True, "bias": True}, True),
        ("int4", 32, {"f16": True, "gated": True, "bias": True}, True),
        ("fp8", 0, {"target": "sm_80"}, False),
        ("fp4", 16, {"gated": True}, False),
        ("fp4", 32, {"bias": True, "half": "f16"}, False),
        ("fp4", 32, {"shared_x": False, "bias": True}, False),
    ],
    ids=str,
)
def test_each_token_has_the_products_of_its_experts_codes(
    tokens: int, format: str, group: int, options: dict[str, Any], scaled_in_half: bool
) -> None:
    ran, error = run(tokens, format, group, **options)
    few = ["quantized_expert_stream"]
    assert ran == (few if tokens <= 16 else ["expert_order", "quantized_expert_tile"])
    rounding = HALF[options.get("half", "bf16")] if scaled_in_half else 0.0
    assert error <= 6 * rounding + EXACT


@pytest.mark.parametrize("tokens", [3, 18])
@pytest.mark.parametrize("shared_x", [True, False])
@pytest.mark.parametrize(
    ("format", "group", "options"),
    [
        ("int8", 0, {"x_format": "int8"}),
        ("int8", 0, {"x_format": "int8", "x_group": 64, "target": "sm_80"}),
        ("fp8", 128, {"x_format": "fp8", "x_group": 128}),
        ("fp8", 0, {"x_format": "fp8", "x_scale": 0.03, "gated": True}),
        ("fp4", 16, {"x_format": "nvfp4", "target": "sm_100"}),
        ("int8", 0, {"x_format": "int8", "columns": True}),
    ],
    ids=str,
)
def test_rows_of_x_are_rounded_before_they_meet_codes(
    tokens: int, shared_x: bool, format: str, group: int, options: dict[str, Any]
) -> None:
    """Once for each token, or for each of its pairs where they have rows of their own."""
    ran, error = run(tokens, format, group, shared_x=shared_x, **options)
    assert ran[0] in ("quantize_rows", "quantize_fp4_rows")
    assert error <= EXACT


@pytest.mark.parametrize("tokens", [4, 17])
def test_inputs_that_fill_no_whole_step(tokens: int) -> None:
    for format, group in (("int8", 0), ("int4", 0), ("fp4", 32)):
        _, error = run(tokens, format, group, k=96, gated=True)
        assert error <= EXACT
        _, error = run(tokens, format, 0 if format != "fp4" else 32, k=224)
        assert error <= EXACT
