"""Tokens that the device chooses are those that the host's sampler chooses from the same model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from castiron.build import BuildOptions, build
from castiron.engines import open_engine
from castiron.runtime import _core
from virtual_gpu import VirtualGpu, without_compiler
from virtual_process import in_process

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / "graph"), str(_TESTS / "runtime")]
from core_engine import finish, params, prompt  # noqa: E402
from zoo import make_checkpoint  # noqa: E402

PROMPT = [5, 9, 77, 30, 22, 140, 9]
#: A step of each kind: greedy rows alone, rows drawn at random among them, penalties and log-probabilities.
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, {}],
    "random": [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 4},
    ],
    "changed": [
        {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "logprobs": 3},
        {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.5, "seed": 5},
        {"stop_token_ids": [191], "min_tokens": 2},
    ],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling")
    make_checkpoint("llama", folder / "model")
    limits: dict[str, Any] = {
        "max_batch_size": 4,
        "max_num_tokens": 32,
        "max_seq_len": 96,
        "max_logit_rows": 8,
    }
    with without_compiler():
        options = BuildOptions(targets=("host", "sm_90"), ptx=False, verify="never", **limits)
        build(folder / "model", folder / "engine", options)
    return folder / "engine"


def serve(path: Path, target: str) -> dict[str, Any]:
    """Serves each group of REQUESTS as one batch; returns the tokens, log-probabilities and steps of each."""
    engine = open_engine(path)
    gpu = VirtualGpu(path) if target != "host" else None
    options: dict[str, Any] = {"num_threads": 1, "kv_cache_blocks": 12}
    if gpu is not None:
        options = {
            "kv_cache_blocks": 12,
            "kernel_images": engine.kernel_images(target),
        }
    program = engine.program(target).model_dump()
    core = _core.Engine(program, str(engine.weights_path), dict(engine.tensors), options)
    served: dict[str, Any] = {"steps": {}}
    for name, group in REQUESTS.items():
        ids = [core.submit(prompt(PROMPT), params(max_tokens=2, **fields)) for fields in group]
        outcomes = finish(core, ids)
        assert not any(outcomes[i].error for i in ids)
        served[name] = [outcomes[i].token_ids for i in ids]
        served["steps"][name] = core.stats(1)["last_step"]
    served["logprobs"] = [
        [(token, logprob) for token, logprob in [(entry.token_id, entry.logprob), *entry.top]]
        for entry in outcomes[ids[0]].logprobs
    ]
    core.shutdown()
    served["faults"] = gpu.driver.faults() if gpu is not None else []
    return served


def test_tokens_are_those_of_the_host(engine: Path) -> None:
    device = in_process(serve, engine, "sm_90", timeout=300)
    host = in_process(serve, engine, "host")
    assert device["faults"] == []
    for name in REQUESTS:
        assert device[name] == host[name]
        step = device["steps"][name]
        assert step["device_sampled"]
        assert step["graph"] > 0
    for found, expected in zip(device["logprobs"], host["logprobs"], strict=True):
        assert [token for token, _ in found] == [token for token, _ in expected]
        # Two kernel paths of the same bfloat16 model, logits of size two.
        assert [p for _, p in found] == pytest.approx([p for _, p in expected], abs=0.03)
