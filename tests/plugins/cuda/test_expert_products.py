"""Products with picked matrices, run by their launches in the Triton interpreter, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from castiron.plugins import Call, Operand
from castiron.plugins.cuda import experts
from castiron.plugins.cuda.experts import TACTICS
from castiron.plugins.tactic import Op
from interpret import TORCH, run_call
from lowering import assert_close, context

LINEAR, GATED = TACTICS[:2]
Ids = np.ndarray[Any, Any]


def distinct(rng: np.random.Generator, tokens: int, picks: int, count: int) -> Ids:
    """As TopK picks them."""
    return np.argsort(rng.random((tokens, count)), axis=1)[:, :picks]


def numbers(rng: np.random.Generator, *shape: int, dtype: str = "f32") -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(TORCH[dtype])


def memory(temporaries: tuple[Operand, ...]) -> dict[str, torch.Tensor]:
    """Full of numbers that are neither pairs nor experts."""
    return {t.name: torch.full([int(d) for d in t.shape], 1 << 30, dtype=torch.int32) for t in temporaries}


def run_product(
    ids: Ids,
    n: int,
    k: int,
    count: int,
    *,
    gated: bool = False,
    shared_x: bool = True,
    bias: bool = False,
    x_dtype: str = "bf16",
    y_dtype: str = "f32",
    half: str = "bf16",
    target: str = "sm_90",
    symbol: str | int = "T",
) -> list[str]:
    """Runs one product and compares it; gives the kernels that ran."""
    tokens, picks = ids.shape
    rng = np.random.default_rng(tokens + n + k)
    parts = ("g", "u") if gated else ("w",)
    x_shape = (k,) if shared_x else (picks, k)
    op = Op(
        "castiron.ExpertGatedLinear" if gated else "castiron.ExpertLinear",
        (
            Operand("x", (symbol, *x_shape), x_dtype),  # type: ignore[arg-type]
            Operand("ids", (symbol, picks), "i32"),
            *(Operand(part, (count * n, k), constant=True) for part in parts),
            *(Operand(f"{part}.b", (count * n,), constant=True) for part in parts if bias),
        ),
        (Operand("y", (symbol, picks, n), y_dtype),),  # type: ignore[arg-type]
        {"experts": count} | ({"activation": "silu"} if gated else {}),
    )
    tactic, known = GATED if gated else LINEAR, context(target, half)
    assert tactic.accepts(op, known)
    lowering = tactic.lower(op, known)
    (call,) = lowering.actions
    assert isinstance(call, Call)
    x = numbers(rng, tokens, *x_shape, dtype=x_dtype)
    weights = [numbers(rng, len(parts) * count * n, k, dtype=half)]
    if bias:
        weights.append(numbers(rng, len(parts) * count * n))
    values = memory(lowering.temporaries) | {"x": x, "ids": torch.from_numpy(ids.astype(np.int32))}
    values["y"] = torch.full((tokens, picks, n), torch.nan, dtype=TORCH[y_dtype])
    ran = run_call(call, values, weights, {"T": tokens})
    operands = [part.double().numpy() for one in weights for part in one.chunk(len(parts))]
    attrs = {"activation": "silu"} if gated else {}
    rounded = x.to(TORCH[half]).double().numpy()
    expected = tactic.reference(rounded, ids, *operands, experts=count, **attrs)[0]  # type: ignore[misc]
    # Float32 sums of k products of about one, and what gate's error is times up.
    assert_close(values["y"], expected, atol=2e-5 * k**0.5)
    return ran


SHAPES = [
    (1, 2, 48, 64, 4),
    (1, 8, 35, 72, 60),
    (5, 3, 33, 25, 6),
    (16, 2, 72, 40, 3),
    (17, 3, 50, 136, 6),
    (40, 1, 16, 33, 5),
    (70, 4, 96, 64, 12),
]


@pytest.mark.parametrize(("tokens", "picks", "n", "k", "count"), SHAPES)
@pytest.mark.parametrize("gated", [False, True])
def test_each_token_has_the_products_of_its_experts(
    tokens: int, picks: int, n: int, k: int, count: int, gated: bool
) -> None:
    ids = distinct(np.random.default_rng(tokens), tokens, picks, count)
    ran = run_product(ids, n, k, count, gated=gated, shared_x=gated, bias=tokens % 2 == 0)
    assert ran == (["expert_stream"] if tokens <= 16 else ["expert_order", "expert_tile"])


@pytest.mark.parametrize("tokens", [4, 16, 90])
@pytest.mark.parametrize("count", [1, 7])
def test_all_tokens_may_pick_one_expert(tokens: int, count: int) -> None:
    run_product(np.full((tokens, 1), count - 1), 40, 48, count, bias=True)


@pytest.mark.parametrize("tokens", [12, 30])
def test_a_token_may_pick_an_expert_several_times(tokens: int) -> None:
    """More rows of one expert than tokens, in tiles that end inside a token's pairs."""
    ids = np.random.default_rng(0).integers(0, 2, (tokens, 5))
    run_product(ids, 24, 32, 3, shared_x=False)


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize(
    ("half", "x_dtype", "y_dtype"), [("f16", "f16", "f16"), ("bf16", "f32", "bf16"), ("f16", "f32", "f32")]
)
def test_operands_and_results_of_other_types(tokens: int, half: str, x_dtype: str, y_dtype: str) -> None:
    ids = distinct(np.random.default_rng(1), tokens, 2, 5)
    run_product(ids, 35, 40, 5, half=half, x_dtype=x_dtype, y_dtype=y_dtype)


@pytest.mark.parametrize("symbol", [3, 24])
def test_fixed_counts_of_tokens_need_no_condition(symbol: int) -> None:
    run_product(distinct(np.random.default_rng(2), symbol, 2, 4), 16, 16, 4, symbol=symbol)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "sm_120"])
@pytest.mark.parametrize("tokens", [2, 33, 300])
def test_other_targets_take_other_tiles(target: str, tokens: int) -> None:
    ids = distinct(np.random.default_rng(3), tokens, 2, 3)
    run_product(ids, 80, 64, 3, gated=True, target=target)


def test_ids_that_name_no_expert_read_no_matrix() -> None:
    """They would be addresses beyond the weights; the other pairs' results are as ever."""
    for tokens in (6, 50):
        ids = distinct(np.random.default_rng(4), tokens, 2, 4)
        ids[tokens // 2] = [-1, 4]
        op_ids = torch.from_numpy(ids.astype(np.int32))
        temporaries, call = _lowered()
        rng = np.random.default_rng(5)
        x, w = numbers(rng, tokens, 32, dtype="bf16"), numbers(rng, 4 * 24, 32, dtype="bf16")
        values = memory(temporaries) | {"x": x, "ids": op_ids, "y": torch.full((tokens, 2, 24), torch.nan)}
        run_call(call, values, [w], {"T": tokens})
        valid = np.where((ids >= 0) & (ids < 4), ids, 0)
        expected = experts.expert_linear(x.double().numpy(), valid, w.double().numpy(), experts=4)[0]
        expected[tokens // 2] = np.nan
        assert_close(values["y"], expected, atol=1e-4)


def _lowered() -> tuple[tuple[Operand, ...], Call]:
    op = Op(
        "castiron.ExpertLinear",
        (
            Operand("x", ("T", 32), "bf16"),
            Operand("ids", ("T", 2), "i32"),
            Operand("w", (4 * 24, 32), constant=True),
        ),
        (Operand("y", ("T", 2, 24)),),
        {"experts": 4},
    )
    lowering = LINEAR.lower(op, context())
    (call,) = lowering.actions
    assert isinstance(call, Call)
    return lowering.temporaries, call
