"""Models of which some layers have a window: those let go of what lies behind it, and no bit changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from castiron.build import BuildOptions, build
from castiron.runtime import ModelRunner, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from zoo import make_checkpoint

WINDOW = 24
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
LENGTHS = (3, 40, 130, 300)
OUTPUT = 90
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, return_generation_logits=True)


def prompt_of(length: int, seed: int = 3) -> list[int]:
    return [int(token) for token in np.random.default_rng([length, seed]).integers(3, 256, length)]


@pytest.fixture(scope="module", params=["gemma3_text", "cohere2"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    overrides = {"sliding_window": WINDOW, "layer_types": LAYERS, "num_hidden_layers": len(LAYERS)}
    model = make_checkpoint(request.param, folder / "model", **overrides)
    options = BuildOptions(
        dtype="float32",
        max_batch_size=4,
        max_num_tokens=512,
        max_logit_rows=512,
        max_seq_len=512,
        verify="never",
    )
    build(folder / "model", folder / "engine", options)
    return model, folder / "engine"


def outputs_of(runner: ModelRunner, prompts: list[list[int]]) -> list[Any]:
    return [result.outputs[0] for result in runner.generate(input_ids=prompts, sampling_params=GREEDY)]


def test_requests_of_several_windows_say_what_transformers_says_and_hold_their_windows(
    built: tuple[Any, Path],
) -> None:
    model, engine = built
    prompts = [prompt_of(length) for length in LENGTHS]
    with ModelRunner.from_dir(engine, max_num_tokens=64) as runner:
        stats = runner.stats()
        assert stats["kv_window"] == WINDOW
        # Three blocks a request, two for a step's chunks, an eighth of 64 for the cache.
        assert stats["kv_blocks_total"] == 64
        assert stats["kv_window_blocks_total"] == 4 * 3 + 2 + 8
        mixed = outputs_of(runner, prompts)
        stats = runner.stats()
        assert stats["kv_integrity_error"] == ""
        assert stats["kv_window_blocks_used"] == stats["kv_window_blocks_promised"] == 0
        assert stats["kv_window_blocks_evicted"] > 0
    for prompt, output in zip(prompts, mixed, strict=True):
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None
            )[0, len(prompt) :]
        assert output.token_ids == expected.tolist()
    # One step over the whole text, in which nothing lies behind anybody's window yet, gives the same bits.
    with ModelRunner.from_dir(engine) as runner:
        for prompt, output in zip(prompts, mixed, strict=True):
            logits = runner.context_logits([*prompt, *output.token_ids])
            assert runner.stats()["last_step"]["prefill_tokens"] == len(prompt) + OUTPUT
            np.testing.assert_array_equal(logits[len(prompt) - 1 : -1], output.generation_logits)


def test_a_warm_prefix_gives_the_bits_of_a_cold_one_and_so_does_one_from_the_host_tier(
    built: tuple[Any, Path],
) -> None:
    _, engine = built
    first = prompt_of(200)
    others = [prompt_of(300, seed) for seed in (11, 12, 13)]
    with ModelRunner.from_dir(engine, max_num_tokens=64, enable_prefix_caching=False) as runner:
        answer = outputs_of(runner, [first])[0].token_ids
        turns = [first + answer + prompt_of(length, 7) for length in (1, 30, 60)]
        branches = [first + prompt_of(length, 7) for length in (30, 100)]
        cold = [outputs_of(runner, [prompt])[0] for prompt in turns + branches]
    with ModelRunner.from_dir(engine, max_num_tokens=64) as runner:
        outputs_of(runner, [first])
        before = runner.stats()["prefix_cached_tokens"]
        warm = [*outputs_of(runner, turns[:1]), *outputs_of(runner, turns[1:]), *outputs_of(runner, branches)]
        # Full blocks of the 289 tokens that were fed; then prompt and answer, which the first turn fed;
        # branches share the prompt.
        assert runner.stats()["prefix_cached_tokens"] - before == 288 + 2 * 290 + 2 * 200
    with ModelRunner.from_dir(
        engine, max_num_tokens=64, kv_cache_blocks=24, max_batch_size=1, kv_cache_host_tier="1MiB"
    ) as runner:
        outputs_of(runner, [first])
        outputs_of(runner, others)
        before = runner.stats()["prefix_cached_tokens"]
        restored = [outputs_of(runner, [prompt])[0] for prompt in turns]
        stats = runner.stats()
        assert stats["prefix_cached_tokens"] - before >= 3 * 288
        assert stats["kv_window_blocks_total"] == 3 + 2 + 3
        assert stats["kv_host_blocks_restored"] == 9
        assert stats["kv_host_window_blocks_restored"] == 1
        assert stats["kv_integrity_error"] == ""
    for of_cold, of_warm in zip(cold, warm, strict=True):
        np.testing.assert_array_equal(of_cold.generation_logits, of_warm.generation_logits)
    for of_cold, of_tier in zip(cold, restored, strict=False):
        np.testing.assert_array_equal(of_cold.generation_logits, of_tier.generation_logits)


def test_set_back_and_searching_requests_say_the_same(built: tuple[Any, Path]) -> None:
    _, engine = built
    prompts = [prompt_of(length) for length in LENGTHS[:3]]
    beams = SamplingParams(use_beam_search=True, best_of=2, max_tokens=40, temperature=0.0, ignore_eos=True)
    with ModelRunner.from_dir(engine) as runner:
        alone = [outputs_of(runner, [prompt])[0] for prompt in prompts]
        searched = runner.generate(input_ids=prompts[2], sampling_params=beams)[0].outputs
    with ModelRunner.from_dir(
        engine,
        max_num_tokens=32,
        kv_cache_blocks=12,
        max_batch_size=3,
        capacity_scheduler_policy="max_utilization",
    ) as runner:
        together = outputs_of(runner, prompts)
        again = runner.generate(input_ids=prompts[2], sampling_params=beams)[0].outputs
        stats = runner.stats()
    assert stats["kv_window_blocks_total"] == 3 * 3 + 1 + 1
    assert stats["preemptions"] > 0
    assert stats["kv_integrity_error"] == ""
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.token_ids for output in again] == [output.token_ids for output in searched]
