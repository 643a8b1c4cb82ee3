"""Engines of CUDA targets on the virtual device, through the runtime that serves them."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.build import BuildOptions, build
from castiron.runtime import ModelRunner
from virtual_gpu import PROMPT, VirtualGpu
from virtual_process import in_process

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from zoo import logits_of, make_checkpoint, source_model

LIMITS: dict[str, Any] = {
    "max_batch_size": 4,
    "max_num_tokens": 16,
    "max_seq_len": 96,
    "max_logit_rows": 16,
    "verify": "never",
}
#: bfloat16 weights and activations (2⁻⁹ relative each) through two layers, logits of size two.
TOLERANCE = 0.06


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "model"
    make_checkpoint("llama", path)
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Path:
    """For host, two architectures and PTX, with kernels as the compilers make them."""
    path = model.parent / "engine"
    build(model, path, BuildOptions(targets=("host", "sm_80", "sm_90"), **LIMITS))
    return path


def generate(engine: Path, cc: int, *, graphs: bool = True, **driver: int) -> dict[str, Any]:
    """Logits of PROMPT, its greedy continuation, and what the driver saw."""
    gpu = VirtualGpu(engine, cc, **driver)
    found = continued(engine, graphs)
    gc.collect()  # the device's memory goes with the runner's last reference
    return {**found, "faults": gpu.driver.faults(), "alive": gpu.driver.alive()}


def continued(engine: Path, graphs: bool) -> dict[str, Any]:
    with ModelRunner.from_dir(engine, device="cuda", cuda_graphs=graphs, kv_cache_blocks=8) as runner:
        logits = runner.context_logits(PROMPT)
        result = runner.generate(input_ids=[PROMPT], max_new_tokens=5, logprobs=3, ignore_eos=True)
        output = result[0].outputs[0]
        return {
            "logits": logits,
            "tokens": output.token_ids,
            "logprobs": [entry.logprob for entry in output.logprobs],
            "graph_steps": runner.stats()["graph_steps"],
            "device": str(runner.device),
        }


@pytest.mark.parametrize(("cc", "target"), [(90, "sm_90"), (80, "sm_80"), (86, "sm_80"), (120, "compute_80")])
def test_logits_are_those_of_transformers(model: Path, engine: Path, cc: int, target: str) -> None:
    found = in_process(generate, engine, cc)
    assert found["faults"] == []
    assert target in found["device"]
    source = source_model(model)
    assert np.abs(found["logits"] - logits_of(source, PROMPT)).max() < TOLERANCE
    whole = logits_of(source, PROMPT + found["tokens"])[len(PROMPT) - 1 : -1]
    short = whole.max(axis=1) - whole[np.arange(5), found["tokens"]]
    assert short.max() < 2 * TOLERANCE  # each token is the source's best, or a tie of rounding with it


def test_replayed_steps_are_those_of_eager_launches_bit_by_bit(engine: Path) -> None:
    replayed, eager = (in_process(generate, engine, 90, graphs=graphs) for graphs in (True, False))
    assert replayed["graph_steps"] > 0
    assert eager["graph_steps"] == 0
    assert replayed["tokens"] == eager["tokens"]
    assert replayed["logprobs"] == eager["logprobs"]
    np.testing.assert_array_equal(replayed["logits"], eager["logits"])


def test_everything_that_was_made_on_the_device_is_destroyed(engine: Path) -> None:
    alive = in_process(generate, engine, 90)["alive"]
    assert alive == type(alive)(0, 0, 0, 0, 0, 0)
