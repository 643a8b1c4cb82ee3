"""Machine code of the products of an 8B model, for every architecture, compiled on this machine.

All shapes and models: benchmarks/cuda_kernels.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from castiron.plugins import Call, Context, Op, Tactic
from castiron.plugins.cuda.linear import TACTICS
from castiron.plugins.launch import TritonKernel
from castiron.plugins.tactic import LoraPlace
from castiron.plugins.targets import TARGETS, Target
from compiling import LIMITS, compiled, gated_op, kernels_of, label, linear_op

LINEAR, GATED = TACTICS
#: What multiplies the tiles of linear_tile and linear_tma. linear_stream is bound by memory and takes the
#: instructions of single warps everywhere.
MATRIX = {"sm_90": "wgmma", "sm_100": "tcgen05"}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_hot_kernels_use_matrix_units_and_wide_loads_and_do_not_spill(target: str) -> None:
    kernels = [
        *kernels_of(LINEAR, linear_op(4096, 4096, residual=True), TARGETS[target]),
        *kernels_of(GATED, gated_op(14336, 4096), TARGETS[target]),
    ]
    hot = [kernel for kernel in kernels if kernel.hot]
    assert len(hot) >= 5
    for kernel, code in compiled(hot, target):
        name, used = f"{target} {label(kernel)}", code.resources
        streams = kernel.function.__name__ == "linear_stream"
        assert used["spills"] == 0, name
        assert used["matrix"] == ("mma" if streams else MATRIX.get(target, "mma")), name
        # Bias and residual may be narrower; tiles must not be.
        assert used["wide_loads"] >= 0.8 * used["global_loads"], name
        assert code.shared_bytes + used["static_shared_bytes"] <= TARGETS[target].shared_bytes, name
        if kernel.function.__name__ == "linear_tma":
            assert code.scratch_bytes > 0, name


def adapted(tactic: Tactic, op: Op, target: Target, starts: tuple[int, ...], rank: int) -> list[TritonKernel]:
    """The kernels of a step with adapters; sizes are multiples of 16, as lowering finds those of models."""
    (call,) = tactic.lower(op, Context(target, "bf16", LIMITS)).actions
    assert isinstance(call, Call)
    assert call.adaptable is not None
    sizes = frozenset(("inputs", "ranks", "columns", "second", "third"))
    kernels = [launch.kernel for launch in call.adaptable.adapted(LoraPlace(rank, starts, 0, 0, 0)).launches]
    return [
        replace(kernel, aligned=sizes & kernel.types.keys())
        for kernel in kernels
        if isinstance(kernel, TritonKernel)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_kernels_of_adapters_use_matrix_units_and_do_not_spill(target: str) -> None:
    device = TARGETS[target]
    kernels = [
        *adapted(LINEAR, linear_op(6144, 4096, y="bf16"), device, (0, 4096, 5120), 16),
        *adapted(LINEAR, linear_op(4096, 4096, residual=True), device, (0,), 64),
        *adapted(GATED, gated_op(14336, 4096), device, (0, 14336), 64),
    ]
    # Products without an activation are as above.
    own = ("lora_shrink", "lora_expand")
    hot = [
        k for k in kernels if k.hot and (k.function.__name__ in own or k.constants["ACTIVATION"] == "sums")
    ]
    assert {kernel.function.__name__ for kernel in hot} >= {*own, "linear_stream"}
    for kernel, code in compiled(hot, target):
        name, used = f"{target} {label(kernel)} rank {kernel.constants.get('RANK')}", code.resources
        assert used["spills"] == 0, name
        if kernel.function.__name__ in own:
            assert used["matrix"] == "mma", name
        # Of ranks 16 what is loaded beside the tiles, rows and y, is most.
        least = 0.2 if kernel.constants.get("RANK") == 16 else 0.8
        assert used["wide_loads"] >= least * used["global_loads"], name
