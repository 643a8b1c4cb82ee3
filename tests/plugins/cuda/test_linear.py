"""Products run by their launches in the Triton interpreter, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from castiron.engines.program import Limits
from castiron.plugins import Call, Context, Op, Operand, Tactic
from castiron.plugins.cuda import linear
from castiron.plugins.cuda.kernels.linear_tma import linear_tma
from castiron.plugins.launch import Grid, KernelLaunch, TritonKernel, row_stride, size, value
from castiron.plugins.targets import TARGETS
from interpret import TORCH, run_call

LIMITS = Limits(max_batch_size=8, max_num_tokens=512, max_logit_rows=8, max_seq_len=64)
LINEAR, GATED = linear.TACTICS


def lowered(tactic: Tactic, op: Op, half: str, target: str = "sm_90") -> tuple[Call, dict[str, torch.Tensor]]:
    """The only call, and memory for its temporaries."""
    context = Context(TARGETS[target], half, LIMITS)
    assert tactic.accepts(op, context)
    lowering = tactic.lower(op, context)
    (call,) = lowering.actions
    assert isinstance(call, Call)
    nans = {t.name: torch.full([int(d) for d in t.shape], torch.nan) for t in lowering.temporaries}
    return call, nans


def matrix(rng: np.random.Generator, rows: int, columns: int, dtype: str, stride: int = 0) -> torch.Tensor:
    """A matrix; with a stride, columns of a wider one whose other numbers are NaN."""
    wide = torch.full((rows, stride or columns), torch.nan)
    wide[:, :columns] = torch.from_numpy(rng.standard_normal((rows, columns)))
    return wide.to(TORCH[dtype])[:, :columns]


def close(found: torch.Tensor, expected: np.ndarray, depth: int) -> None:
    """Float32 sums of ``depth`` products of about one are off by some depth ** 0.5 rounding steps.

    A result that is stored in half is off by half a step of its own precision besides.
    """
    step = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[found.dtype]
    scale = max(1.0, depth**0.5)
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=step + 1e-5, atol=4e-6 * scale)


def run_linear(
    rows: int,
    n: int,
    k: int,
    half: str = "bf16",
    x_dtype: str | None = None,
    y_dtype: str = "f32",
    bias: bool = False,
    residual: bool = False,
    activation: str = "none",
    alpha: float = 1.0,
    stride: int = 0,
    symbol: int | str = "T",
    target: str = "sm_90",
) -> list[str]:
    """Runs one product and compares it; gives the kernels that ran."""
    rng = np.random.default_rng(rows * n + k)
    x_dtype = x_dtype or half
    op = Op(
        "castiron.Linear",
        (
            Operand("x", (symbol, k), x_dtype),
            Operand("w", (n, k), constant=True),
            Operand("b", (n,), constant=True) if bias else None,
            Operand("r", (symbol, n)) if residual else None,
        ),
        (Operand("y", (symbol, n), y_dtype),),
        {"activation": activation, "alpha": alpha},
    )
    call, temporaries = lowered(LINEAR, op, half, target)
    values = {"x": matrix(rng, rows, k, x_dtype, stride), "y": torch.full((rows, n), torch.nan)}
    values["y"] = values["y"].to(TORCH[y_dtype])
    weights = [matrix(rng, n, k, half)]
    if bias:
        weights.append(torch.from_numpy(rng.standard_normal(n)).float())
    r = None
    if residual:
        values["r"] = matrix(rng, rows, n, "f32", n + 3)
        r = values["r"].double().numpy()
    x = values["x"].to(TORCH[half])
    expected = LINEAR.reference(
        x.double().numpy(),
        weights[0].double().numpy(),
        weights[1].double().numpy() if bias else None,
        r,
        activation=activation,
        alpha=alpha,
    )[0]
    ran = run_call(call, values | temporaries, weights, {"T": rows, "N": rows})
    close(values["y"], expected, k)
    return ran


@pytest.mark.parametrize("rows", [1, 7, 16])
@pytest.mark.parametrize(("n", "k"), [(48, 64), (50, 200), (33, 25)])
def test_few_rows_stream_the_weights_once(rows: int, n: int, k: int) -> None:
    assert run_linear(rows, n, k, bias=True, residual=True, activation="silu", alpha=0.5) == ["linear_stream"]


@pytest.mark.parametrize("rows", [17, 64, 65, 300])
def test_each_row_count_has_exactly_one_product(rows: int) -> None:
    ran = run_linear(rows, 72, 136)
    assert ran in (["linear_tile"], ["linear_tile", "linear_reduce"])


def test_split_sums_are_added_in_order_with_the_whole_epilogue() -> None:
    for rows in (17, 63):
        ran = run_linear(rows, 40, 3000, bias=True, residual=True, activation="gelu_erf", alpha=2.0)
        assert ran == ["linear_tile", "linear_reduce"]


@pytest.mark.parametrize(("half", "x_dtype", "y_dtype"), [("f16", "f16", "f16"), ("bf16", "f32", "bf16")])
@pytest.mark.parametrize("rows", [3, 20])
def test_operands_and_results_of_other_types(rows: int, half: str, x_dtype: str, y_dtype: str) -> None:
    run_linear(rows, 35, 40, half, x_dtype, y_dtype, residual=True)


@pytest.mark.parametrize("rows", [2, 18])
def test_column_views_are_read_with_their_stride(rows: int) -> None:
    run_linear(rows, 16, 48, stride=70)


def test_a_fixed_row_count_needs_no_condition() -> None:
    assert run_linear(5, 16, 16, symbol=5) == ["linear_stream"]
    assert run_linear(40, 16, 16, symbol=40)[0] == "linear_tile"


@pytest.mark.parametrize("rows", [1, 17, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_products_multiply_the_activated_gate_with_up(rows: int, bias: bool) -> None:
    n, k = 45, 72
    rng = np.random.default_rng(rows)
    op = Op(
        "castiron.GatedLinear",
        (
            Operand("x", ("T", k), "bf16"),
            Operand("g", (n, k), constant=True),
            Operand("u", (n, k), constant=True),
            *((Operand("gb", (n,), constant=True), Operand("ub", (n,), constant=True)) if bias else ()),
        ),
        (Operand("y", ("T", n), "bf16"),),
        {"activation": "silu"},
    )
    call, temporaries = lowered(GATED, op, "bf16")
    weights = [matrix(rng, 2 * n, k, "bf16")]
    if bias:
        weights.append(torch.from_numpy(rng.standard_normal(2 * n)).float())
    values = {
        "x": matrix(rng, rows, k, "bf16"),
        "y": torch.full((rows, n), torch.nan, dtype=torch.bfloat16),
    }
    w = weights[0].double().numpy()
    b = weights[1].double().numpy() if bias else np.zeros(2 * n)
    expected = GATED.reference(values["x"].double().numpy(), w[:n], w[n:], b[:n], b[n:], activation="silu")[0]
    run_call(call, values | temporaries, weights, {"T": rows})
    close(values["y"], expected, k)


@pytest.mark.parametrize("seed", range(16))
def test_random_products_on_random_targets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([1, 5, 16, 17, 40, 64, 70, 256, 260]))
    n, k = (int(size) for size in rng.integers(1, 300, 2))
    if rng.random() < 0.5:
        n, k = 16 * (n // 16 + 1), 16 * (k // 16 + 1)
    choices = {
        "target": str(rng.choice(["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_80"])),
        "half": str(rng.choice(["bf16", "f16"])),
        "x_dtype": str(rng.choice(["f32", "half"])),
        "bias": bool(rng.random() < 0.5),
        "residual": bool(rng.random() < 0.5),
        "activation": str(rng.choice(["none", "silu", "gelu_tanh", "relu2"])),
    }
    print(f"seed {seed}: {rows} x {n} x {k}, {choices}")
    choices["x_dtype"] = choices["half"] if choices["x_dtype"] == "half" else "f32"
    run_linear(rows, n, k, **choices)  # type: ignore[arg-type]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("grid", [1, 3])
def test_persistent_blocks_with_tma_cover_every_tile_once(gated: bool, grid: int) -> None:
    rows, n, k, block = 150, 200, 72, 128
    rng = np.random.default_rng(0)
    x, w = matrix(rng, rows, k, "bf16"), matrix(rng, 2 * n if gated else n, k, "bf16")
    bias = torch.from_numpy(rng.standard_normal(len(w))).float()
    residual = matrix(rng, rows, n, "f32", n + 8)
    y = torch.full((rows, n), torch.nan)
    kernel = TritonKernel(
        linear_tma,
        {
            "x": "*bf16",
            "w": "*bf16",
            "bias": "*fp32",
            "residual": "*fp32",
            "y": "*fp32",
            "rows": "i32",
            "residual_stride": "i32",
        },
        {
            "N": n,
            "K": k,
            "BLOCK_M": block,
            "BLOCK_N": block,
            "BLOCK_K": 64,
            "GROUP_M": 8,
            "SPECIALIZE": False,
            "GATED": gated,
            "ACTIVATION": "silu",
            "ALPHA": 0.5,
            "HAS_BIAS": True,
            "HAS_RESIDUAL": True,
        },
        num_warps=8,
    )
    args = (*map(value, "xwbry"), size("T"), row_stride("r"))
    launch = KernelLaunch(kernel, (Grid(times=grid),), args)
    values = {"x": x, "w": w, "b": bias, "r": residual, "y": y}
    run_call(Call("linear", ["x", "r"], ["y"], launches=(launch,)), values, counts={"T": rows})
    products = x.double() @ w.double().T + bias
    gate = torch.nn.functional.silu(products[:, :n])
    expected = 0.5 * (gate * products[:, n:] if gated else gate) + residual
    close(y, expected.numpy(), k)


def test_a_residual_may_be_overwritten_in_place() -> None:
    op = Op(
        "castiron.Linear",
        (
            Operand("x", ("T", 32), "bf16"),
            Operand("w", (24, 32), constant=True),
            None,
            Operand("r", ("T", 24)),
        ),
        (Operand("y", ("T", 24)),),
    )
    call, _ = lowered(LINEAR, op, "bf16")
    assert call.in_place == ((0, 1),)
    rng = np.random.default_rng(0)
    x, w, r = matrix(rng, 4, 32, "bf16"), matrix(rng, 24, 32, "bf16"), matrix(rng, 4, 24, "f32")
    expected = x.double() @ w.double().T + r.double()
    run_call(call, {"x": x, "r": r, "y": r}, [w], {"T": 4})
    close(r, expected.numpy(), 32)
