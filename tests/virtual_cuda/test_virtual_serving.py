"""Requests side by side on the virtual device: mixed steps, padded replays, cancels, the price of a step."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from castiron.build import BuildOptions, build
from castiron.engines import open_engine
from castiron.runtime.loading import load_core
from castiron.runtime.options import RuntimeOptions
from castiron.runtime.verify import verify
from virtual_gpu import VirtualGpu, without_compiler
from virtual_process import in_process

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / "graph"), str(_TESTS / "runtime")]
from core_engine import finish, params, prompt  # noqa: E402
from zoo import make_checkpoint, source_model  # noqa: E402

#: In bfloat16 the best token's logit may be this much short of the source's best (test_virtual_engines).
TIE = 0.12
PROMPTS = [[(7 * i + 3 * n) % 200 + 3 for i in range(length)] for n, length in enumerate((3, 19, 33, 8, 5))]
ALLOCATIONS = (
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuModuleLoadDataEx",
    "cuStreamCreate",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "model"
    make_checkpoint("llama", path)
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Path:
    """With golden outputs, for host and sm_90."""
    path = model.parent / "engine"
    options = BuildOptions(
        targets=("host", "sm_90"),
        ptx=False,
        max_batch_size=4,
        max_num_tokens=16,
        max_seq_len=64,
        max_logit_rows=16,
    )
    with without_compiler():
        build(model, path, options)
    return path


def start(path: Path, **options: Any) -> tuple[VirtualGpu, Any]:
    gpu = VirtualGpu(path, 90)
    return gpu, load_core(open_engine(path), RuntimeOptions(device="cuda", kv_cache_blocks=9, **options)).core


def driver_calls(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Calls between two counts, of driver functions alone."""
    names = [name for name in after if name.startswith("cu")]
    return {name: after[name] - before.get(name, 0) for name in names if after[name] != before.get(name, 0)}


def serve(path: Path) -> dict[str, Any]:
    gpu, core = start(path)
    before = gpu.driver.counters()
    ids = [core.submit(prompt(tokens), params(max_tokens=4 + n)) for n, tokens in enumerate(PROMPTS)]
    cancelled = core.submit(prompt(PROMPTS[0]), params(max_tokens=40))
    core.cancel(cancelled)
    outcomes = finish(core, [*ids, cancelled], seconds=200)
    stats = core.stats(64)
    core.shutdown()
    return {
        "tokens": [outcomes[i].token_ids for i in ids],
        "reasons": [outcomes[i].finish_reason for i in (*ids, cancelled)],
        "errors": [outcomes[i].error for i in ids] + gpu.driver.faults(),
        "steps": stats["recent_steps"],
        "calls": driver_calls(before, gpu.driver.counters()),
    }


def test_requests_of_all_lengths_share_steps_and_get_their_own_answers(model: Path, engine: Path) -> None:
    seen = in_process(serve, engine, timeout=400)
    assert not any(seen["errors"])
    assert seen["reasons"] == ["length"] * 5 + ["cancelled"]
    mixed = [step for step in seen["steps"] if step["prefill_tokens"] and step["decode_tokens"]]
    assert mixed
    assert not any(step["graph"] for step in mixed)
    replayed = [step["decode_tokens"] for step in seen["steps"] if step["graph"]]
    assert 3 in replayed, "three requests replay the graph of four, padded"
    source = source_model(model)
    for n, (tokens, answer) in enumerate(zip(PROMPTS, seen["tokens"], strict=True)):
        assert len(answer) == 4 + n
        with torch.no_grad():
            logits = source(torch.tensor([tokens + answer]), use_cache=False).logits[0][len(tokens) - 1 : -1]
        short = logits.max(-1).values - logits[torch.arange(len(answer)), torch.tensor(answer)]
        assert short.max() < TIE


def test_serving_allocates_nothing(engine: Path) -> None:
    calls = in_process(serve, engine, timeout=400)["calls"]
    # What is freed is freed by the shutdown.
    assert not {name for name in ALLOCATIONS if name in calls and "Free" not in name}


def decode_steps(path: Path) -> dict[str, Any]:
    """Driver calls of five decode steps more."""
    gpu, core = start(path)
    counts = []
    for tokens in (2, 3, 8):  # the first also does what a thread does once
        before = gpu.driver.counters()
        finish(core, [core.submit(prompt([5, 6, 7]), params(max_tokens=tokens))])
        counts.append(Counter(driver_calls(before, gpu.driver.counters())))
    launched = core.stats()["graph_steps"]
    core.shutdown()
    counts[2].subtract(counts[1])
    return {"calls": {name: n for name, n in counts[2].items() if n}, "graph_steps": launched}


def test_a_replayed_step_is_one_launch_besides_marking_its_end_and_the_wait(engine: Path) -> None:
    seen = in_process(decode_steps, engine)
    # Each of them has another step behind it, so an event tells where it ends.
    assert seen["calls"] == {"cuGraphLaunch": 5, "cuEventRecord": 5, "cuEventSynchronize": 5}


def stopped(path: Path) -> dict[str, Any]:
    """A request that ends while a step with a row of it is on the device, and who comes after it."""
    gpu, core = start(path)
    asked = PROMPTS[2]

    def answers(*requests: tuple[list[int], dict[str, Any]]) -> list[Any]:
        ids = [core.submit(prompt(tokens), params(**fields)) for tokens, fields in requests]
        outcomes = finish(core, ids, seconds=200)
        return [outcomes[i] for i in ids]

    (whole,) = answers((asked, {"max_tokens": 12}))
    stop = whole.token_ids[7]
    cut, beside = answers(
        (asked, {"max_tokens": 12, "stop_token_ids": [stop]}), (PROMPTS[0], {"max_tokens": 12})
    )
    # What the cache has of them is what was said, and no more.
    after, again = answers(
        (asked + cut.token_ids, {"max_tokens": 12 - len(cut.token_ids)}), (PROMPTS[0], {"max_tokens": 12})
    )
    stats = core.stats(64)
    core.shutdown()
    return {
        "whole": whole.token_ids,
        "stop": stop,
        "cut": cut.token_ids,
        "reason": cut.finish_reason,
        "after": after.token_ids,
        "beside": [beside.token_ids, again.token_ids],
        "steps": stats["recent_steps"],
        "ahead_steps": stats["ahead_steps"],
        "faults": gpu.driver.faults(),
    }


def test_a_row_of_a_request_that_turns_out_to_have_ended_leaves_no_trace(engine: Path) -> None:
    seen = in_process(stopped, engine, timeout=400)
    assert seen["faults"] == []
    assert seen["reason"] == "stop"
    assert seen["cut"] == seen["whole"][: seen["whole"].index(seen["stop"])]
    assert seen["cut"] + seen["after"] == seen["whole"]
    assert seen["beside"][0] == seen["beside"][1]
    ahead = [step for step in seen["steps"] if step["ahead"]]
    assert len(ahead) == seen["ahead_steps"] > len(seen["steps"]) / 2
    assert any(step["graph"] for step in ahead)
    assert any(step["prefill_tokens"] for step in ahead), "chunks of prompts are started ahead as well"
    assert all(step["queued_s"] == 0 for step in seen["steps"] if not step["ahead"])


def speculated(path: Path) -> dict[str, Any]:
    """A plain run, one with guesses from the text, and one with guesses of the engine's CPU program."""
    gpu, plain = start(path)
    guessing: dict[str, dict[str, Any]] = {
        "text": {"speculative_decoding": "ngram"},
        "draft": {"speculative_decoding": "draft", "draft_engine": path},
    }
    cores = {"plain": plain}
    for name, options in guessing.items():
        options |= {"device": "cuda", "kv_cache_blocks": 9}
        cores[name] = load_core(open_engine(path), RuntimeOptions(**options)).core
    seen: dict[str, Any] = {}
    for name, core in cores.items():
        # A text that repeats itself, and one beside it that does not.
        ids = [
            core.submit(prompt(tokens), params(max_tokens=14)) for tokens in ([9, 8, 7, 6] * 5, PROMPTS[0])
        ]
        outcomes = finish(core, ids, seconds=300)
        stats = core.stats()
        core.shutdown()
        seen[name] = {
            "tokens": [outcomes[i].token_ids for i in ids],
            "errors": [outcomes[i].error for i in ids],
            **{key: stats[key] for key in ("draft_tokens", "accepted_tokens")},
        }
    return seen | {"faults": gpu.driver.faults()}


def test_guesses_are_taken_and_change_no_answer(engine: Path) -> None:
    seen = in_process(speculated, engine, timeout=500)
    assert seen["faults"] == []
    plain = seen["plain"]
    for name in ("text", "draft"):
        assert seen[name]["errors"] == ["", ""]
        assert seen[name]["tokens"] == plain["tokens"]
        assert seen[name]["draft_tokens"] >= seen[name]["accepted_tokens"] > 0


def verified(path: Path, device: str) -> dict[str, Any]:
    gpu = VirtualGpu(path, 90) if device == "cuda" else None
    report = verify(open_engine(path), options=RuntimeOptions(device=device))
    return {
        "passed": report.passed,
        "problems": report.problems,
        "device": report.device,
        "faults": gpu.driver.faults() if gpu else [],
    }


@pytest.mark.parametrize("device", ["host", "cuda"])
def test_one_engine_folder_is_verified_on_the_cpu_and_on_the_gpu(engine: Path, device: str) -> None:
    report = in_process(verified, engine, device, timeout=400)
    assert report["passed"], report["problems"]
    assert report["faults"] == []


def tiered(path: Path) -> dict[str, Any]:
    """Prompts by turns, in a pool that holds one of them and has a tier behind it, and in one for all."""
    gpu, wide = start(path)
    options = RuntimeOptions(device="cuda", kv_cache_blocks=2, kv_cache_host_tier="1MiB")
    narrow = load_core(open_engine(path), options).core
    seen: dict[str, Any] = {"answers": {}}
    for name, core in (("wide", wide), ("narrow", narrow)):
        answers = []
        for tokens in [[(7 * i + 3 * n) % 200 + 3 for i in range(40)] for n in range(3)] * 2:
            request = core.submit(prompt(tokens), params(max_tokens=3, logprobs=2))
            outcome = finish(core, [request], seconds=200)[request]
            assert outcome.error == ""
            answers.append((outcome.token_ids, [x.logprob for x in outcome.logprobs]))
        seen["answers"][name] = answers
        seen[name] = core.stats()
        core.shutdown()
    return seen | {"faults": gpu.driver.faults()}


def test_blocks_come_back_from_pinned_memory_as_they_went(engine: Path) -> None:
    seen = in_process(tiered, engine, timeout=400)
    assert seen["faults"] == []
    assert seen["answers"]["narrow"] == seen["answers"]["wide"]
    for name in ("wide", "narrow"):
        assert seen[name]["prefix_cached_tokens"] == 3 * 32, "each prompt's full block, the second time"
    assert seen["narrow"]["kv_host_blocks_restored"] == 3
    assert seen["wide"]["kv_blocks_evicted"] == 0
