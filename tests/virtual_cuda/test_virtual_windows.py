"""Layers with a window in blocks of their own, on the virtual device: they answer as in common ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.build import BuildOptions, build
from castiron.engines import open_engine
from castiron.runtime.loading import load_core
from castiron.runtime.options import RuntimeOptions
from virtual_gpu import VirtualGpu, without_compiler
from virtual_process import in_process

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from core_engine import finish, params, prompt
from zoo import make_checkpoint

#: Three blocks, of which a token sees one or two: the zoo's windows are 8.
PROMPTS = [[(11 * i + 5 * n) % 200 + 3 for i in range(85 + n)] for n in range(2)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    make_checkpoint("gemma3_text", folder / "model")
    options = BuildOptions(
        targets=("sm_90",),
        ptx=False,
        max_batch_size=1,
        max_num_tokens=32,
        max_seq_len=128,
        max_logit_rows=32,
        verify="never",
    )
    with without_compiler():
        build(folder / "model", folder / "engine", options)
    return folder / "engine"


def answers(engine_dir: Path) -> dict[str, Any]:
    """In common blocks, and in blocks apart, of which there are too few to keep all; each prompt twice."""
    gpu = VirtualGpu(engine_dir, 90)
    seen: dict[str, Any] = {}
    for name, blocks in (("together", 4), ("apart", 7)):
        options = RuntimeOptions(device="cuda", kv_cache_blocks=blocks)
        core = load_core(open_engine(engine_dir), options).core
        found = []
        for tokens in PROMPTS * 2:
            number = core.submit(prompt(tokens), params(max_tokens=2, logprobs=2))
            outcome = finish(core, [number], seconds=200)[number]
            assert outcome.error == ""
            found.append((outcome.token_ids, [entry.logprob for entry in outcome.logprobs]))
        seen[name] = {"answers": found, **core.stats()}
        core.shutdown()
    return seen | {"faults": gpu.driver.faults()}


def test_blocks_apart_answer_as_common_ones(engine: Path) -> None:
    windows = [layer.window for layer in open_engine(engine).program("sm_90").kv_layers]
    assert windows == [8, 0]
    seen = in_process(answers, engine, timeout=500)
    assert seen["faults"] == []
    # A request is promised three window blocks, and the chunk of a step takes one more.
    totals = {name: seen[name]["kv_window_blocks_total"] for name in ("together", "apart")}
    assert totals == {"together": 0, "apart": 3 + 1}
    apart, together = seen["apart"], seen["together"]
    assert apart["kv_window_blocks_evicted"] > 0
    assert apart["kv_integrity_error"] == ""
    for (tokens, logprobs), (expected, close) in zip(apart["answers"], together["answers"], strict=True):
        assert tokens == expected
        # A prefix from the cache is computed in other chunks, by other launches.
        np.testing.assert_allclose(logprobs, close, atol=0.03)
    # At first nothing is cached: the same launches, the same bits.
    assert apart["answers"][0] == together["answers"][0]
