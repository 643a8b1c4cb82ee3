"""Products with LoRA adapters in the Triton interpreter, against float64 and against themselves without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from castiron.engines.program import Limits
from castiron.engines.symbols import LORA_TILE
from castiron.plugins import Call, Context, Lowering, Op, Operand, Tactic
from castiron.plugins.cuda import linear
from castiron.plugins.tactic import Adapted, LoraPlace
from castiron.plugins.targets import TARGETS
from interpret import TORCH, run_call

LIMITS = Limits(max_batch_size=8, max_num_tokens=512, max_logit_rows=8, max_seq_len=64)
LINEAR, GATED = linear.TACTICS
SLOTS = 3
#: Rows of no adapter, of the first slot and of the last, in runs as sequences have them.
PATTERN = (2, -1, 2, 0, -1, 0, 2)


@dataclass
class Problem:
    """A product [rows, k] x [n, k] (gated: twice), and adapters of ``modules`` in three slots."""

    op: Op
    values: dict[str, torch.Tensor]
    weights: list[torch.Tensor]
    slots: torch.Tensor
    place: LoraPlace
    adapter_of: np.ndarray[Any, Any]

    @property
    def step(self) -> dict[str, torch.Tensor]:
        """Tiles of rows as docs/cuda-program.md has them."""
        rows: list[int] = []
        slots = []
        for slot in sorted({*self.adapter_of.tolist()} - {-1}):
            mine = np.flatnonzero(self.adapter_of == slot)
            padded = -(-len(mine) // LORA_TILE) * LORA_TILE
            rows += [*mine.tolist(), *[-1] * (padded - len(mine))]
            slots += [slot] * (padded // LORA_TILE)
        # Padding, as a replayed graph has it.
        names = {"lora_rows": [*rows, *[-1] * LORA_TILE], "lora_slots": [*slots, -1]}
        return {name: torch.tensor(array, dtype=torch.int32) for name, array in names.items()}

    def sums(self) -> np.ndarray[Any, Any]:
        """x · wᵀ with what the adapters add, float64."""
        half = self.weights[0].dtype
        x = self.values["x"].to(half).double().numpy()
        sums = x @ self.weights[0].double().numpy().T
        rank, (starts, columns) = self.place.rank, (self.place.starts, sums.shape[1])
        for row, slot in enumerate(self.adapter_of):
            if slot < 0:
                continue
            memory = self.slots[slot * self.place.slot_bytes // 2 :].double().numpy()
            a = memory[self.place.a // 2 :][: rank * len(starts) * x.shape[1]].reshape(-1, x.shape[1])
            b = memory[self.place.b // 2 :][: columns * rank].reshape(columns, rank)
            for number, first in enumerate(starts):
                end = starts[number + 1] if number + 1 < len(starts) else columns
                shrunk = a[number * rank : (number + 1) * rank] @ x[row]
                sums[row, first:end] += b[first:end] @ shrunk
        return sums


def problem(
    rows: int,
    n: int,
    k: int,
    *,
    gated: bool = False,
    starts: tuple[int, ...] = (0,),
    rank: int = 16,
    half: Any = "bf16",
    x_dtype: Any = None,
    y_dtype: Any = "f32",
    bias: bool = False,
    residual: bool = False,
    activation: str = "none",
    alpha: float = 1.0,
    stride: int = 0,
) -> Problem:
    rng = np.random.default_rng(rows * n + k)
    columns = 2 * n if gated else n

    def numbers(*shape: int, dtype: str) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to(TORCH[dtype])

    wide = torch.full((rows, stride or k), torch.nan, dtype=TORCH[x_dtype or half])
    wide[:, :k] = numbers(rows, k, dtype=x_dtype or half)
    values = {"x": wide[:, :k], "y": torch.full((rows, n), torch.nan, dtype=TORCH[y_dtype])}
    x = Operand("x", ("T", k), x_dtype or half)
    y = Operand("y", ("T", n), y_dtype)
    weights = [numbers(columns, k, dtype=half)]
    if bias:
        weights.append(numbers(columns, dtype="f32"))
    if gated:
        names = ("g", "u")
        biases = tuple(Operand(f"{name}b", (n,), constant=True) for name in names) if bias else ()
        matrices = tuple(Operand(name, (n, k), constant=True) for name in names)
        op = Op("castiron.GatedLinear", (x, *matrices, *biases), (y,), {"activation": activation})
    else:
        if residual:
            values["r"] = numbers(rows, n, dtype="f32")
        op = Op(
            "castiron.Linear",
            (
                x,
                Operand("w", (n, k), constant=True),
                Operand("b", (n,), constant=True) if bias else None,
                Operand("r", ("T", n)) if residual else None,
            ),
            (y,),
            {"activation": activation, "alpha": alpha},
        )
    a_bytes = -(-2 * rank * len(starts) * k // 256) * 256
    slot_bytes = 512 + a_bytes + -(-2 * rank * columns // 256) * 256
    place = LoraPlace(rank, starts, 256, 512 + a_bytes, slot_bytes)
    slots = (numbers(SLOTS * slot_bytes // 2, dtype=half).float() / k**0.25).to(TORCH[half])
    # An adapter that nobody uses may hold anything.
    slots[slot_bytes // 2 : slot_bytes] = torch.nan
    adapter_of = np.array([PATTERN[(i // 3) % len(PATTERN)] for i in range(rows)])
    return Problem(op, values, weights, slots, place, adapter_of)


def lowered(tactic: Tactic, one: Problem, half: Any, target: str) -> tuple[Call, Lowering, Adapted]:
    lowering = tactic.lower(one.op, Context(TARGETS[target], half, LIMITS))
    (call,) = lowering.actions
    assert isinstance(call, Call)
    assert call.adaptable is not None
    return call, lowering, call.adaptable.adapted(one.place)


def run(
    tactic: Tactic, one: Problem, half: Any, target: str = "sm_90"
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """y without and with adapters, and the kernels that ran with them."""
    call, lowering, adapted = lowered(tactic, one, half, target)
    counts = {"T": len(one.adapter_of), "A": len(one.step["lora_slots"])}

    def memory(*operands: Operand) -> dict[str, torch.Tensor]:
        made = {}
        for operand in operands:
            shape = [counts[dim] if isinstance(dim, str) else dim for dim in operand.shape]
            made[operand.name] = torch.full(shape, torch.nan, dtype=TORCH[operand.dtype])
        return made

    results = []
    for launches, beside in ((call.launches, ()), (adapted.launches, adapted.temporaries)):
        values = {**one.values, "y": one.values["y"].clone()}
        values |= memory(*lowering.temporaries, *beside)
        ran = run_call(
            replace(call, launches=launches), values, one.weights, counts, step=one.step, slots=one.slots
        )
        results.append(values["y"])
    return results[0], results[1], ran


def check(tactic: Tactic, one: Problem, half: Any, target: str = "sm_90") -> list[str]:
    """Rows with adapters are right, the others have the bits that they have without; gives the kernels."""
    plain, found, ran = run(tactic, one, half, target)
    none = one.adapter_of < 0
    assert torch.equal(found[none], plain[none])
    assert torch.isfinite(found).all()
    sums = one.sums()
    attrs = one.op.attrs
    if len(one.weights) == 2:
        sums = sums + one.weights[1].double().numpy()
    n = one.values["y"].shape[1]
    act = {"none": lambda v: v, "silu": lambda v: v / (1 + np.exp(-v)), "relu": lambda v: np.maximum(v, 0)}
    expected = act[attrs["activation"]](sums[:, :n])
    if sums.shape[1] > n:
        expected = expected * sums[:, n:]
    expected = expected * attrs.get("alpha", 1.0)
    if "r" in one.values:
        expected = expected + one.values["r"].double().numpy()
    # x · aᵀ is rounded to half, and y, where it is half, before and after what is added.
    step = {"bf16": 2.0**-8, "f16": 2.0**-11}[half]
    size = np.abs(expected).max()
    error = np.abs(found.double().numpy() - expected)[~none].max(initial=0)
    assert error <= 2 * step * size, f"{error} of {size}"
    # What the adapters add is far more than that.
    assert len(one.adapter_of) < 4 or np.abs((found - plain).double().numpy()).max() > 16 * step * size
    return ran


@pytest.mark.parametrize("rows", [1, 5, 16, 40])
@pytest.mark.parametrize("residual", [False, True])
def test_a_plain_product_gets_its_adapters_behind_it(rows: int, residual: bool) -> None:
    one = problem(rows, 200, 136, bias=True, residual=residual, alpha=0.5)
    ran = check(LINEAR, one, "bf16")
    assert ran[-2:] == ["lora_shrink", "lora_expand"]


@pytest.mark.parametrize("rows", [4, 40, 300])
@pytest.mark.parametrize("gated", [False, True])
def test_activations_and_gates_get_them_in_their_sums(rows: int, gated: bool) -> None:
    one = problem(
        *(rows, 72, 136), gated=gated, starts=(0, 72) if gated else (0,), bias=True, activation="silu"
    )
    ran = check(GATED if gated else LINEAR, one, "bf16")
    assert ran[-3:] == ["lora_shrink", "lora_expand", "linear_reduce"]


def test_parts_of_the_inputs_join_in_order_and_products_cut_in_parts_too() -> None:
    one = problem(40, 40, 3000, activation="silu", gated=True, starts=(0, 40))
    ran = check(GATED, one, "bf16")
    assert ran == [
        *("linear_tile", "linear_reduce"),
        *("lora_shrink", "lora_expand", "linear_reduce"),
    ]


def test_the_accelerators_tiles_give_their_sums() -> None:
    one = problem(300, 1024, 512, activation="silu", gated=True, starts=(0,))
    assert check(GATED, one, "bf16")[0] == "linear_tma"


@pytest.mark.parametrize("starts", [(0, 96), (0, 100, 150), (0, 1, 2), (8, 129)])
def test_each_column_takes_the_ranks_of_its_own_module(starts: tuple[int, ...]) -> None:
    one = problem(7, 200, 64, starts=starts)
    if starts[0]:  # columns ahead of the first module are nobody's: zeros in its b
        b = one.place.b // 2
        for slot in range(SLOTS):
            at = slot * one.place.slot_bytes // 2 + b
            one.slots[at : at + starts[0] * one.place.rank] = 0
        one.place = replace(one.place, starts=(0, *starts[1:]))
    check(LINEAR, one, "bf16")


@pytest.mark.parametrize("rank", [16, 32, 48, 128])
def test_ranks_are_multiples_of_sixteen(rank: int) -> None:
    check(LINEAR, problem(20, 130, 80, rank=rank), "bf16")


@pytest.mark.parametrize(("half", "x_dtype", "y_dtype"), [("f16", "f16", "f16"), ("bf16", "f32", "bf16")])
def test_operands_and_results_of_other_types(half: str, x_dtype: str, y_dtype: str) -> None:
    check(LINEAR, problem(9, 35, 40, half=half, x_dtype=x_dtype, y_dtype=y_dtype, stride=50), half)


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_100", "sm_120", "compute_80"])
def test_every_target_adds_the_same(target: str) -> None:
    check(LINEAR, problem(33, 64, 64, starts=(0, 32)), "bf16", target)
    check(GATED, problem(33, 64, 64, gated=True, starts=(0, 64), activation="relu"), "bf16", target)


def test_a_rows_bits_depend_on_no_other_row() -> None:
    one = problem(16, 90, 1100)
    _, together, _ = run(LINEAR, one, "bf16")
    for row in range(16):
        values = {"x": one.values["x"][row : row + 1], "y": one.values["y"][:1]}
        alone = replace(one, values=values, adapter_of=one.adapter_of[row : row + 1])
        _, found, _ = run(LINEAR, alone, "bf16")
        assert torch.equal(found[0], together[row])


def test_a_product_of_rows_that_are_no_steps_takes_none() -> None:
    op = Op(
        "castiron.Linear",
        (Operand("x", (5, 32), "bf16"), Operand("w", (24, 32), constant=True)),
        (Operand("y", (5, 24)),),
    )
    (call,) = LINEAR.lower(op, Context(TARGETS["sm_90"], "bf16", LIMITS)).actions
    assert isinstance(call, Call)
    assert call.adaptable is None
