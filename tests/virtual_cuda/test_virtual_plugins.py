"""Engines with plugins' kernels, end to end on the virtual device."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.build import BuildOptions, build
from castiron.runtime import ModelRunner
from test_virtual_engines import LIMITS, TOLERANCE, continued
from virtual_gpu import PROMPT, VirtualGpu
from virtual_process import ScenarioError, in_process

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from zoo import logits_of, make_checkpoint, source_model

SILU_MUL = Path(__file__).parents[2] / "examples" / "plugins" / "silu_mul.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugins") / "model"
    make_checkpoint("llama", path)
    return path


def built(model: Path, plugin: Path, name: str, *targets: str) -> Path:
    engine = model.parent / name
    build(model, engine, BuildOptions(targets=targets, plugins=(plugin,), **LIMITS))
    return engine


@pytest.fixture(scope="module")
def engine(model: Path) -> Path:
    """With the fused activation in CUDA C++, as NVRTC makes it."""
    return built(model, SILU_MUL, "engine", "sm_80", "sm_90")


def generate(engine: Path, plugin: Path, cc: int, *, graphs: bool = True) -> dict[str, Any]:
    gpu = VirtualGpu(engine, cc, [plugin])
    found = continued(engine, graphs)
    gc.collect()
    ran = {name: count for name, count in gpu.interpreter.launches.items() if name.startswith("silu_mul")}
    return {**found, "faults": gpu.driver.faults(), "ran": ran}


@pytest.mark.parametrize(("cc", "target"), [(90, "sm_90"), (86, "sm_80"), (120, "compute_80")])
def test_a_kernel_in_cuda_c_runs_inside_an_engine(model: Path, engine: Path, cc: int, target: str) -> None:
    found = in_process(generate, engine, SILU_MUL, cc)
    assert found["faults"] == []
    assert target in found["device"]
    # Two layers in each step: PROMPT has two (21 tokens, 16 a step), twice, and four more tokens follow.
    assert sum(found["ran"].values()) == 2 * (2 + 2 + 4)
    assert np.abs(found["logits"] - logits_of(source_model(model), PROMPT)).max() < TOLERANCE


def test_replayed_steps_with_it_are_those_of_eager_launches_bit_by_bit(engine: Path) -> None:
    replayed, eager = (in_process(generate, engine, SILU_MUL, 90, graphs=graphs) for graphs in (True, False))
    assert replayed["graph_steps"] > 0
    assert eager["graph_steps"] == 0
    assert (replayed["tokens"], replayed["logprobs"]) == (eager["tokens"], eager["logprobs"])
    np.testing.assert_array_equal(replayed["logits"], eager["logits"])


def failing(engine: Path, plugin: Path) -> tuple[str, str]:
    """What the user is told, and what the device found."""
    gpu = VirtualGpu(engine, 90, [plugin])
    with ModelRunner.from_dir(engine, device="cuda", kv_cache_blocks=8) as runner:
        (result,) = runner.generate(input_ids=[PROMPT], max_new_tokens=1)
    return str(result.error), gpu.driver.faults()[0]


@pytest.mark.parametrize(
    ("right", "wrong", "block", "place"),
    [
        ("y += (long long)blockIdx.x", "y += ((long long)blockIdx.x + 1)", 15, "byte 0 behind the end of an"),
        ("y[i] = store(", "if (i == 0) y[-1] = 0; y[i] = store(", 0, "before the start of an"),
        ("up += (long long)blockIdx.x", "up += (1ll << 40) + blockIdx.x", 15, "far from every"),
    ],
)
def test_a_kernel_that_leaves_its_operands_is_told(
    model: Path, tmp_path: Path, right: str, wrong: str, block: int, place: str
) -> None:
    text = SILU_MUL.read_text()
    assert right in text
    plugin = tmp_path / "silu_mul.py"
    plugin.write_text(text.replace(right, wrong))
    told, fault = in_process(failing, built(model, plugin, f"engine-{place[:5]}", "sm_90"), plugin)
    assert "illegal memory access" in told
    assert f"kernel silu_mul.9, thread (0, 0, 0) of block ({block}, 0, 0): " in fault
    assert f"{place} operand" in fault


def test_a_plugin_that_the_engine_was_not_built_with_is_refused(engine: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "silu_mul.py"
    plugin.write_text(SILU_MUL.read_text())
    with pytest.raises(ScenarioError, match="AssertionError"):
        in_process(generate, engine, plugin, 90)
