"""Machine code of the products of an 8B model, for every architecture, compiled on this machine.

All shapes and models: benchmarks/cuda_kernels.py.
"""

from __future__ import annotations

import pytest
from castiron.plugins.cuda.linear import TACTICS
from castiron.plugins.targets import TARGETS
from compiling import compiled, gated_op, kernels_of, label, linear_op

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
