"""Speculative decoding in the core: the same output, bit for bit, in fewer steps."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.runtime import _core
from core_engine import arguments, finish, generate, params, prompt

from castiron import ModelRunner
from castiron.errors import EngineError, RequestError

VOCAB = 50  # of the tokens below; the engine has a few more
LOOP = [3, 17, 40, 8, 21, 9] * 5
PROMPTS = [LOOP, [7, 7, 7, 7, 7, 7], [(11 * i + 2) % VOCAB for i in range(60)], [*LOOP[:20], 1, *LOOP]]
FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.5, "seed": 6, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"bad_words": [[17, 40], [7]], "logit_bias": {8: 2.0}},
    {"no_repeat_ngram_size": 4, "temperature": 0.5, "seed": 8},
    {"stop_token_ids": [8, 33, 12], "min_tokens": 9},
    {"stop_token_ids": list(range(20)), "temperature": 1.0, "seed": 11},
    {"allowed_token_ids": [3, 7, 8, 17, 40]},
]


def all_outcomes(core: Any, **more: Any) -> list[tuple[Any, ...]]:
    """What every prompt gives with every set of parameters, all in the engine at once."""
    ids = [
        core.submit(prompt(tokens), params(max_tokens=40, logprobs=3, **fields, **more))
        for tokens, fields in itertools.product(PROMPTS, FIELDS)
    ]
    outcomes = finish(core, ids)
    return [
        (
            outcome.token_ids,
            outcome.finish_reason,
            outcome.stop_token_id,
            [(x.logprob, x.top) for x in outcome.logprobs],
        )
        for outcome in (outcomes[request] for request in ids)
    ]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_outputs_are_the_same_bits_with_and_without(start: Any, method: str) -> None:
    expected = all_outcomes(start())
    core = start(speculative_decoding=method, num_speculative_tokens=6)
    assert all_outcomes(core) == expected
    stats = core.stats()
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]
    # Short of room in the cache, requests are set back in the middle of it.
    small = start(speculative_decoding=method, kv_cache_blocks=4, capacity_scheduler_policy="max_utilization")
    assert all_outcomes(small) == expected
    assert small.stats()["accepted_tokens"] > 0


def test_fewer_steps_give_a_text_that_repeats(start: Any) -> None:
    plain, quick = start(), start(speculative_decoding="suffix", num_speculative_tokens=4)
    fields: dict[str, Any] = {"max_tokens": 40, "allowed_token_ids": [7]}  # it can say one thing only
    assert generate(quick, [7] * 6, **fields).token_ids == generate(plain, [7] * 6, **fields).token_ids
    assert plain.stats()["steps"] == 40
    stats = quick.stats(1024)
    assert stats["steps"] < 25
    assert stats["generated_tokens"] == 40
    # The first token comes from the prompt's step, and each other step gives one besides the drafts.
    assert stats["accepted_tokens"] == 40 - stats["steps"]
    steps = stats["recent_steps"]
    assert sum(step["draft_tokens"] for step in steps) == stats["draft_tokens"]
    assert sum(step["accepted_tokens"] for step in steps) == stats["accepted_tokens"]
    assert all(step["logit_rows"] == 1 + step["draft_tokens"] for step in steps)
    assert all(step["decode_tokens"] <= 1 and step["draft_tokens"] <= 4 for step in steps)


def test_a_request_can_do_without(start: Any) -> None:
    core = start(speculative_decoding="ngram")
    expected = all_outcomes(start())
    assert all_outcomes(core, num_speculative_tokens=0) == expected
    assert core.stats()["draft_tokens"] == 0
    assert all_outcomes(core, num_speculative_tokens=2) == expected
    assert core.stats()["draft_tokens"] > 0


def test_sampled_tokens_have_the_models_distribution(start: Any) -> None:
    """Second and third tokens, which are drafted, against their exact distribution."""
    # One at a time: in a full batch a row is too dear for guesses that are mostly wrong.
    core = start(speculative_decoding="suffix", prefix_caching=False, max_batch_size=1)
    choices = [3, 8, 17, 40]
    given = [choices[i] for i in np.random.default_rng(5).integers(0, 4, 60)]

    def probabilities(*after: int) -> np.ndarray[Any, Any]:
        outcome = generate(core, [*given, *after], max_tokens=0, context_logits=True)
        assert outcome.context_logits is not None
        weights = np.exp(outcome.context_logits[-1][choices].astype(np.float64) / 6)
        return np.asarray(weights / weights.sum())

    exact = np.zeros((4, 4, 4))
    for i, j in itertools.product(range(4), repeat=2):
        exact[i, j] = (
            probabilities()[i] * probabilities(choices[i])[j] * probabilities(choices[i], choices[j])
        )
    draws = 2500
    before = core.stats()
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 6.0, "allowed_token_ids": choices}
    ids = [core.submit(prompt(given), params(**fields)) for _ in range(draws)]
    counts = np.zeros_like(exact)
    for outcome in finish(core, ids).values():
        counts[tuple(choices.index(token) for token in outcome.token_ids[:3])] += 1
    after = core.stats()
    drafted, accepted = (after[key] - before[key] for key in ("draft_tokens", "accepted_tokens"))
    assert accepted > 100
    assert drafted - accepted > 200
    # Pearson's statistic has mean k and variance about 2k; six deviations from there is no accident.
    expected = exact * draws
    common = expected >= 5
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    cells = int(common.sum())
    assert cells > 20
    assert statistic < cells + 6 * np.sqrt(2 * cells)


def test_grammars_are_followed_with_drafts_and_beside_them(start: Any) -> None:
    choices = ((7, 8), (9,), (3, 17, 40))

    def mask(num_output: int) -> np.ndarray[Any, Any]:
        words = np.zeros(2, np.uint32)
        for token in choices[num_output % 3]:
            words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
        return words

    def masks_for(wish: Any) -> np.ndarray[Any, Any]:
        masks = [mask(wish.num_output)]
        for i, draft in enumerate(wish.drafts):
            if draft not in choices[(wish.num_output + i) % 3]:
                break
            masks.append(mask(wish.num_output + i + 1))
        return np.stack(masks)

    def outcomes(core: Any, free: int) -> list[list[int]]:
        done = threading.Event()

        def give() -> None:
            while not done.is_set():
                for wish in core.poll_masks(0.05):
                    core.give_masks(wish.request_id, wish.num_output, len(wish.drafts), masks_for(wish))

        thread = threading.Thread(target=give)
        thread.start()
        try:
            fields: dict[str, Any] = {"max_tokens": 30, "temperature": 0.8, "seed": 3}
            ids = [core.submit(prompt(LOOP), params(first_mask=mask(0), **fields)) for _ in range(3)]
            ids += [core.submit(prompt(LOOP), params(**fields)) for _ in range(free)]
            return [outcome.token_ids for outcome in finish(core, ids).values()]
        finally:
            done.set()
            thread.join()

    expected = outcomes(start(), 2)
    core = start(speculative_decoding="suffix")
    assert outcomes(core, 0) == expected[:3]
    stats = core.stats()
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]
    assert outcomes(core, 2) == expected
    for tokens in expected[:3]:
        assert all(token in choices[i % 3] for i, token in enumerate(tokens))


def test_cached_prefixes_hold_nothing_of_rejected_drafts(start: Any) -> None:
    core = start(speculative_decoding="ngram", num_speculative_tokens=8)
    cold = start(prefix_caching=False)
    history = LOOP[:12]
    for turn in range(5):
        fields: dict[str, Any] = {"max_tokens": 17, "temperature": 1.2, "seed": turn, "logprobs": 2}
        outcome, alone = generate(core, history, **fields), generate(cold, history, **fields)
        assert outcome.token_ids == alone.token_ids
        assert [x.top for x in outcome.logprobs] == [x.top for x in alone.logprobs]
        history = [*history, *outcome.token_ids, *LOOP[:3]]
    stats = core.stats()
    assert stats["draft_tokens"] > stats["accepted_tokens"]
    assert stats["prefix_cached_tokens"] > 100


def test_a_draft_engine_guesses_and_the_output_stays(engine_folder: Path, start: Any) -> None:
    expected = all_outcomes(start())
    given = arguments(engine_folder)
    draft = {key: given[key] for key in ("program", "weights_path", "tensors")}
    for options in ({}, {"kv_cache_blocks": 4, "capacity_scheduler_policy": "max_utilization"}):
        options = {"num_threads": 1, "num_speculative_tokens": 4, **options}
        core = _core.Engine(**{**given, "options": options, "draft": draft})
        assert all_outcomes(core) == expected
        core.shutdown()
    # The same model drafts for itself: it is right as often as it is asked.
    core = _core.Engine(
        **{**given, "options": {"num_threads": 1, "num_speculative_tokens": 4}, "draft": draft}
    )
    for seed in range(5):
        fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": seed}
        assert (
            generate(core, PROMPTS[2][:20], **fields).token_ids
            == generate(start(), PROMPTS[2][:20], **fields).token_ids
        )
    stats = core.stats()
    core.shutdown()
    assert stats["draft_tokens"] == stats["accepted_tokens"] > 0


def test_a_draft_engine_must_fit(engine_folder: Path) -> None:
    with pytest.raises(EngineError, match="speculative_decoding is draft and draft_engine is None; expected"):
        ModelRunner.from_dir(engine_folder, speculative_decoding="draft")
    with pytest.raises(EngineError, match="expected both draft and an engine's folder, or neither"):
        ModelRunner.from_dir(engine_folder, draft_engine=engine_folder)
    call = {"input_ids": PROMPTS[:2], "max_new_tokens": 30, "end_id": -1}
    with ModelRunner.from_dir(engine_folder, num_threads=1) as plain:
        expected = [r.outputs[0].token_ids for r in plain.generate(**call)]
    with ModelRunner.from_dir(
        engine_folder, num_threads=1, speculative_decoding="draft", draft_engine=engine_folder
    ) as runner:
        assert [r.outputs[0].token_ids for r in runner.generate(**call)] == expected
        assert runner.stats()["accepted_tokens"] > 0


def test_a_runner_speculates_and_refuses_what_makes_no_sense(engine_folder: Path) -> None:
    call = {"input_ids": PROMPTS[:2], "max_new_tokens": 30, "end_id": -1}
    with ModelRunner.from_dir(engine_folder, num_threads=1) as plain:
        expected = [r.outputs[0].token_ids for r in plain.generate(**call)]
    with ModelRunner.from_dir(engine_folder, num_threads=1, speculative_decoding="suffix") as runner:
        assert [r.outputs[0].token_ids for r in runner.generate(**call)] == expected
        drafted = runner.stats()["draft_tokens"]
        assert drafted > 0
        runner.generate(**call, num_speculative_tokens=0)
        assert runner.stats()["draft_tokens"] == drafted
        with pytest.raises(RequestError, match="num_speculative_tokens is 65; expected an integer from 0"):
            runner.generate(**call, num_speculative_tokens=65)
    with pytest.raises(EngineError, match=r"speculative_decoding is 'medusa'; expected none or ngram"):
        ModelRunner.from_dir(engine_folder, speculative_decoding="medusa")
    with pytest.raises(EngineError, match="num_speculative_tokens is 4, and speculative_decoding is none"):
        ModelRunner.from_dir(engine_folder, num_speculative_tokens=4)
    with pytest.raises(EngineError, match="expected at most 64"):
        ModelRunner.from_dir(engine_folder, speculative_decoding="ngram", num_speculative_tokens=65)
