"""LoRA adapters on engines of a CUDA target, on the virtual device."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from castiron.build import BuildOptions, build
from castiron.calibration import QuantizationOptions
from castiron.engines import open_engine
from castiron.runtime import ModelRunner, SamplingParams
from castiron.runtime.outputs import Update
from virtual_gpu import PROMPT, VirtualGpu, without_compiler
from virtual_process import in_process

from castiron.errors import EngineError, RequestError

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / "graph"), str(_TESTS / "build")]
from peft_adapters import merge, module_sizes, write_adapter  # noqa: E402
from zoo import logits_of, make_checkpoint, round_to_int8, source_model  # noqa: E402

LIMITS: dict[str, Any] = {
    "targets": ("sm_90",),
    "ptx": False,
    "max_batch_size": 4,
    "max_num_tokens": 16,
    "max_seq_len": 96,
    "max_logit_rows": 16,
    "max_lora_rank": 10,
    "verify": "never",
}
#: bfloat16 weights, activations and adapters (2⁻⁹ relative each) through two layers, logits of size one to
#: ten.
TOLERANCE = 0.02


def built(folder: Path, **options: Any) -> Path:
    with without_compiler():
        build(folder / "model", folder / "engine", BuildOptions(**(LIMITS | options)))
    return folder / "engine"


def with_adapter(engine: Path, adapters: Mapping[str, str]) -> dict[str, Any]:
    """Logits and tokens with adapter "a", and logits without."""
    gpu = VirtualGpu(engine, 90)
    with ModelRunner.from_dir(engine, device="cuda", lora_modules=adapters, kv_cache_blocks=8) as runner:
        found = runner.context_logits(PROMPT, lora="a")
        (result,) = runner.generate(input_ids=[PROMPT], max_new_tokens=5, ignore_eos=True, lora="a")
        plain = runner.context_logits(PROMPT)
        steps = runner.stats()["graph_steps"]
    return {
        "logits": found,
        "tokens": result.outputs[0].token_ids,
        "plain": plain,
        "graph_steps": steps,
        "faults": gpu.driver.faults(),
    }


def close(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    assert np.abs(found - wanted).max() <= TOLERANCE * max(1.0, np.abs(wanted).max())


#: q, k and v in one product, gate and up in another; one module for gate and up; GPT-2's Conv1D with biases
#: and an activated product.
@pytest.mark.parametrize("name", ["llama_tied", "phi3", "gpt2"])
def test_an_adapter_of_every_module_equals_merged_weights(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path / "model")
    engine = built(tmp_path)
    source = source_model(tmp_path / "model")
    plain = logits_of(source, PROMPT)
    pairs = write_adapter(tmp_path / "adapter", module_sizes(source), rank=5, use_rslora=True)
    merge(source, pairs, 10 / np.sqrt(5))
    found = in_process(with_adapter, engine, {"a": str(tmp_path / "adapter")}, timeout=400)
    assert found["faults"] == []
    assert found["graph_steps"] > 0
    close(found["plain"], plain)
    wanted = logits_of(source, PROMPT + found["tokens"])
    close(found["logits"], wanted[: len(PROMPT)])
    answer = wanted[len(PROMPT) - 1 : -1]
    short = answer.max(axis=1) - answer[np.arange(5), found["tokens"]]
    assert short.max() <= 2 * TOLERANCE * max(1.0, np.abs(wanted).max())
    assert np.abs(found["logits"] - plain).max() > 10 * TOLERANCE  # it does something


def test_a_quantized_engine_adds_to_its_own_weights(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "model")
    round_to_int8(tmp_path / "model")
    recipe = QuantizationOptions(recipe="int8-wo", calib_size=2, calib_seq_len=32, eval_tokens=0)
    engine = built(tmp_path, quantization=recipe)
    program = open_engine(engine).program("sm_90")
    assert any(step.kernel == "quantized_gated_linear" and step.adapted for step in program.steps)
    source = source_model(tmp_path / "model")
    pairs = write_adapter(tmp_path / "adapter", module_sizes(source), rank=7, dtype=torch.bfloat16)
    merge(source, pairs, 2.0)
    found = in_process(with_adapter, engine, {"a": str(tmp_path / "adapter")}, timeout=400)
    assert found["faults"] == []
    close(found["logits"], logits_of(source, PROMPT))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """An engine, and three adapters of different ranks and modules."""
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder / "model")
    engine = built(folder)
    sizes = module_sizes(source_model(folder / "model"))
    some = {path: size for path, size in sizes.items() if "self_attn" in path or "gate" in path}
    ends = {path: size for path, size in sizes.items() if "down" in path or "lm_head" in path}
    write_adapter(folder / "a", sizes, rank=8, seed=1)
    write_adapter(folder / "b", some, rank=3, seed=2, size=0.3)
    write_adapter(folder / "c", ends, rank=16, seed=3, size=0.2)
    return engine, {name: str(folder / name) for name in "abc"}


Answer = tuple[list[int], list[list[float]]]


def answers(runner: ModelRunner, jobs: list[tuple[list[int], str | None]], tokens: int = 4) -> list[Answer]:
    """Tokens and log-probabilities of requests that run at once, each with its adapter."""
    updates: list[list[Update]] = [[] for _ in jobs]
    left, done = [len(jobs)], threading.Event()

    def sink(update: Update, mine: list[Update]) -> None:
        mine.append(update)
        left[0] -= update.finish_reason is not None
        if not left[0]:
            done.set()

    for (prompt, lora), mine in zip(jobs, updates, strict=True):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=3, detokenize=False, lora=lora)
        runner.session.submit(prompt, params, partial(sink, mine=mine))
    assert done.wait(300)
    results: list[Answer] = []
    for mine in updates:
        assert [update.error for update in mine if update.error] == []
        entries = [entry for update in mine for entry in update.logprobs]
        results.append(
            ([e.token_id for e in entries], [[e.logprob, *(p for _, p in e.top)] for e in entries])
        )
    return results


def opened(engine: Path, adapters: Mapping[str, str], **options: Any) -> ModelRunner:
    given = {"device": "cuda", "kv_cache_blocks": 24, "lora_modules": adapters, **options}
    return ModelRunner.from_dir(engine, **given)


JOBS: list[tuple[list[int], str | None]] = [
    (PROMPT[: 3 + 4 * n], lora) for n, lora in enumerate(("a", None, "b", "c"))
]


def mixed(engine: Path, adapters: dict[str, str]) -> dict[str, Any]:
    gpu = VirtualGpu(engine, 90)
    seen: dict[str, Any] = {}
    for name, options in (("replayed", {}), ("eager", {"cuda_graphs": False})):
        with opened(engine, adapters, enable_prefix_caching=False, **options) as runner:
            seen[name] = answers(runner, JOBS)
            stats = runner.stats()
            seen[f"{name} graph steps"] = stats["graph_steps"]
            if name == "replayed":
                seen["alone"] = [answers(runner, [job])[0] for job in JOBS]
                seen["stats"] = {key: stats[key] for key in ("lora_adapters", "lora_bytes", "cuda")}
    return seen | {"faults": gpu.driver.faults()}


def test_adapters_share_steps_and_graphs_and_change_no_bit_of_each_other(
    llama: tuple[Path, dict[str, str]],
) -> None:
    engine, adapters = llama
    seen = in_process(mixed, engine, adapters, timeout=600)
    assert seen["faults"] == []
    assert seen["replayed graph steps"] > 0
    assert seen["eager graph steps"] == 0
    assert seen["replayed"] == seen["eager"] == seen["alone"]
    assert len({tuple(tokens) for tokens, _ in seen["alone"]}) == 4
    slot = open_engine(engine).program("sm_90").adapters
    assert slot is not None
    assert seen["stats"]["lora_adapters"] == 3
    assert seen["stats"]["lora_bytes"] == 3 * slot.slot_bytes
    assert seen["stats"]["cuda"]["lora_bytes"] == 4 * slot.slot_bytes


def counted(engine: Path, adapters: dict[str, str], lora: str | None, enable: bool) -> dict[str, Any]:
    """Launches and driver calls of one request."""
    gpu = VirtualGpu(engine, 90)
    options: dict[str, Any] = {} if enable else {"lora_modules": {}}
    with opened(engine, adapters, **options) as runner:
        before, calls = Counter(gpu.interpreter.launches), Counter(gpu.driver.counters())
        (answer,) = answers(runner, [(PROMPT, lora)])
        launches = Counter(gpu.interpreter.launches) - before
        calls = Counter(gpu.driver.counters()) - calls
    return {
        "answer": answer,
        "launches": dict(launches),
        "calls": {name: n for name, n in calls.items() if name.startswith("cu") and "Ctx" not in name},
    }


def test_steps_without_an_adapter_are_those_of_an_engine_without(llama: tuple[Path, dict[str, str]]) -> None:
    engine, adapters = llama
    plain, off = (
        in_process(counted, engine, adapters, None, enable, timeout=400) for enable in (True, False)
    )
    assert plain == off
    assert not any("lora" in name for name in plain["launches"])
    adapted = in_process(counted, engine, adapters, "a", True, timeout=400)
    assert any("lora_expand" in name for name in adapted["launches"])
    # The adapter is copied once, and nothing else is called than without.
    adapted["calls"]["cuMemcpyHtoDAsync"] -= 1
    launched = ("cuLaunchKernel",)
    assert {k: v for k, v in adapted["calls"].items() if k not in launched} == {
        k: v for k, v in plain["calls"].items() if k not in launched
    }


def swapped(engine: Path, adapters: dict[str, str]) -> dict[str, Any]:
    """Adapters by turns, in one slot and in three."""
    gpu = VirtualGpu(engine, 90)
    jobs = [(PROMPT[: 4 + n], lora) for n, lora in enumerate(("a", "b", None, "c", "a"))]
    seen: dict[str, Any] = {}
    for slots in (3, 1):
        options = {"max_loras": slots, "max_cpu_loras": 3, "enable_prefix_caching": False}
        with opened(engine, adapters, **options) as runner:
            seen[f"{slots} together"] = answers(runner, jobs, 3)
            if slots == 3:
                seen["apart"] = [answers(runner, [job], 3)[0] for job in jobs]
    return seen | {"faults": gpu.driver.faults()}


def test_slots_are_given_to_others_and_filled_again(llama: tuple[Path, dict[str, str]]) -> None:
    seen = in_process(swapped, *llama, timeout=900)
    assert seen["faults"] == []
    assert seen["3 together"] == seen["1 together"] == seen["apart"]


def updated(engine: Path, adapters: dict[str, str]) -> dict[str, Any]:
    """Adapters loaded and unloaded while others run; cached prefixes; guesses from the text."""
    gpu = VirtualGpu(engine, 90)
    seen: dict[str, Any] = {}
    repeated = [9, 8, 7, 6] * 9
    with opened(engine, {"a": adapters["a"]}, max_cpu_loras=2, max_loras=2) as runner:
        done: list[Any] = []
        running = threading.Thread(
            target=lambda: done.append(answers(runner, [(repeated, "a"), (PROMPT, None)], 8))
        )
        running.start()
        runner.load_lora("b", adapters["b"])
        seen["b"] = answers(runner, [(PROMPT, "b")])
        runner.unload_lora("a")
        running.join()
        seen["during"] = done[0]
        (refused,) = runner.generate(input_ids=[PROMPT], lora="a")
        seen["gone"] = refused.error
        runner.load_lora("a", adapters["c"])  # another one under the name
        cached = []
        for lora in ("a", "a", "b"):
            (result,) = runner.generate(input_ids=repeated, max_new_tokens=1, ignore_eos=True, lora=lora)
            cached.append(result.cached_tokens)
        seen["cached"] = cached
        seen["c as a"] = answers(runner, [(PROMPT, "a")])
    options = {"speculative_decoding": "ngram"}
    with opened(engine, {"a": adapters["a"], "c": adapters["c"]}, **options) as runner:
        seen["guessed"] = answers(runner, [(repeated, "a"), (PROMPT, None)], 8)
        seen["c"] = answers(runner, [(PROMPT, "c")])
        seen["accepted"] = runner.stats()["draft_tokens"]
    return seen | {"faults": gpu.driver.faults()}


def test_adapters_come_and_go_while_requests_run(llama: tuple[Path, dict[str, str]]) -> None:
    seen = in_process(updated, *llama, timeout=900)
    assert seen["faults"] == []
    tokens = {key: [t for t, _ in seen[key]] for key in ("during", "guessed", "b", "c", "c as a")}
    assert tokens["during"] == tokens["guessed"]
    assert tokens["c as a"] == tokens["c"] != tokens["b"]
    assert "'a'" in seen["gone"]
    assert seen["cached"][0] == seen["cached"][2] == 0  # another adapter, another cache
    assert seen["cached"][1] >= 32
    assert seen["accepted"] > 0


def refusal(engine: Path, options: dict[str, Any], adapter: str | None = None) -> str:
    VirtualGpu(engine, 90)
    try:
        with ModelRunner.from_dir(engine, device="cuda", kv_cache_blocks=8, **options) as runner:
            if adapter is not None:
                runner.load_lora("x", adapter)
    except (EngineError, RequestError) as error:
        return str(error)
    return ""


def test_what_an_engine_cannot_take_is_refused_with_the_way_out(
    llama: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    engine, adapters = llama
    sizes = {"model.layers.0.mlp.up_proj": (64, 128)}
    write_adapter(tmp_path / "wide", sizes, rank=17)
    assert "rank" in in_process(refusal, engine, {"enable_lora": True}, str(tmp_path / "wide"))
    found = in_process(refusal, engine, {"enable_lora": True, "max_lora_rank": 17})
    assert "max_lora_rank is 17" in found
    assert "ranks up to 16" in found  # 10, rounded up
    assert "--max-lora-rank 17" in found
    found = in_process(refusal, engine, {"enable_lora": True, "max_loras": 10**7, "max_cpu_loras": 10**7})
    assert "LoRA adapters" in found
    assert "--max-loras" in found
    make_checkpoint("llama", tmp_path / "model")
    plain = built(tmp_path, max_lora_rank=None)
    found = in_process(refusal, plain, {"lora_modules": adapters})
    assert "without LoRA adapters" in found
    assert "--max-lora-rank" in found
    assert all(not step.modules for step in open_engine(plain).program("sm_90").steps)


def test_numbers_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "model")
    engine = built(tmp_path, dtype="float16")
    sizes = {"model.layers.0.mlp.up_proj": (64, 128)}
    write_adapter(tmp_path / "large", sizes, rank=4, size=1e5)
    found = in_process(refusal, engine, {"enable_lora": True}, str(tmp_path / "large"))
    assert "model.layers.0.mlp.up_proj" in found
    assert "float16" in found
