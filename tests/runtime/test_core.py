"""The C++ core from Python: right numbers, requests that do not touch each other, every request ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.runtime import _core
from core_engine import arguments, finish, generate, params, prompt, tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.TinyModel()


@pytest.fixture
def core(engine_folder: Path) -> Iterator[Any]:
    engine = _core.Engine(**arguments(engine_folder))
    yield engine
    engine.shutdown()


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Greedy decoding by the float64 model."""
    history = list(tokens)
    for _ in range(count):
        history.append(int(model.logits(history, [len(history) - 1])[0].argmax()))
    return history[len(tokens) :]


def test_context_logits_are_those_of_the_float64_model(core: Any, model: Any) -> None:
    tokens = [(7 * i + 3) % 50 for i in range(90)]  # six chunks of at most 16
    outcome = generate(core, tokens, max_tokens=1, context_logits=True)
    expected = model.logits(tokens, range(90))
    assert outcome.context_logits is not None
    assert outcome.context_logits.shape == (90, tiny.VOCAB)
    # float32 sums of up to 40 products of magnitude ~1 through one layer; logits are of magnitude ~5
    np.testing.assert_allclose(outcome.context_logits, expected, atol=2e-4)
    assert outcome.token_ids == [int(expected[-1].argmax())]


def test_greedy_tokens_are_the_float64_models_whatever_runs_beside(core: Any, model: Any) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50, rng.integers(1, 60)).tolist() for _ in range(24)]
    ids = {core.submit(prompt(p), params(max_tokens=20)): p for p in prompts}
    outcomes = finish(core, ids)
    for request_id, tokens in ids.items():
        assert outcomes[request_id].token_ids == greedy(model, tokens, 20)
        assert outcomes[request_id].finish_reason == "length"
    stats = core.stats()
    assert stats["kv_blocks_used"] == 0
    assert stats["requests_finished"]["length"] == 24


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(core: Any) -> None:
    fields = {"temperature": 1.2, "top_p": 0.9, "seed": 2**64 - 5, "max_tokens": 30}
    alone = generate(core, [1, 2, 3], **fields).token_ids
    ids = [core.submit(prompt([1, 2, 3]), params(**fields))]
    ids += [core.submit(prompt([5] * n), params(temperature=1.0, max_tokens=25)) for n in range(1, 12)]
    assert finish(core, ids)[ids[0]].token_ids == alone
    assert generate(core, [1, 2, 3], **{**fields, "seed": 6}).token_ids != alone


def test_requests_without_a_seed_differ(core: Any) -> None:
    runs = [generate(core, [1, 2, 3], temperature=1.5, max_tokens=30).token_ids for _ in range(3)]
    assert runs[0] != runs[1] != runs[2]


def test_the_stop_token_is_named_and_not_among_the_tokens(core: Any, model: Any) -> None:
    expected = greedy(model, [4, 5], 20)
    stop = expected[3]
    outcome = generate(core, [4, 5], max_tokens=20, stop_token_ids=[stop], logprobs=0)
    assert outcome.token_ids == expected[: expected.index(stop)]
    assert (outcome.finish_reason, outcome.stop_token_id) == ("stop", stop)
    assert len(outcome.logprobs) == len(outcome.token_ids)
    later = generate(core, [4, 5], max_tokens=20, stop_token_ids=[stop], min_tokens=10)
    assert len(later.token_ids) >= 10
    assert stop not in later.token_ids[:10]


def test_logprobs_are_the_raw_log_softmax(core: Any, model: Any) -> None:
    outcome = generate(
        core, [9, 8, 7], max_tokens=8, logprobs=4, temperature=0.7, seed=3, repetition_penalty=1.5
    )
    history = [9, 8, 7]
    for token, entry in zip(outcome.token_ids, outcome.logprobs, strict=True):
        logits = model.logits(history, [len(history) - 1])[0].astype(np.float64)
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[token], abs=5e-4)
        order = np.argsort(-expected)[:4]
        assert [token_id for token_id, _ in entry.top] == order.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(expected[order], abs=5e-4)
        history.append(token)


def test_a_context_that_is_full_ends_with_length(core: Any) -> None:
    outcome = generate(core, [3] * 90, max_tokens=50)
    assert len(outcome.token_ids) == tiny.LIMITS.max_seq_len - 90
    assert outcome.finish_reason == "length"


def test_ids_from_vocab_limit_on_are_never_chosen(engine_folder: Path) -> None:
    made = arguments(engine_folder)
    made["options"] = {"vocab_limit": 10}
    core = _core.Engine(**made)
    outcome = generate(core, [1, 2, 3], temperature=5.0, max_tokens=80)
    assert max(outcome.token_ids) < 10
    core.shutdown()


def test_cancel_ends_a_request_and_frees_its_blocks(core: Any) -> None:
    ids = [core.submit(prompt([i]), params(max_tokens=90)) for i in range(20)]
    for request_id in ids[::2]:
        core.cancel(request_id)
    outcomes = finish(core, ids)
    assert all(outcomes[request_id].finish_reason == "length" for request_id in ids[1::2])
    assert {outcomes[request_id].finish_reason for request_id in ids[::2]} <= {"cancelled", "length"}
    assert core.stats()["kv_blocks_used"] == 0


def test_poll_lets_other_threads_run_and_wakes_up_for_news(core: Any) -> None:
    assert core.poll(0.0) == []
    arrived: list[float] = []
    thread = threading.Thread(target=lambda: arrived.extend(bool(core.poll(30.0)) for _ in range(1)))
    thread.start()
    begin = time.monotonic()
    core.submit(prompt([1]), params(max_tokens=1))
    thread.join(20.0)
    assert arrived == [True]
    assert time.monotonic() - begin < 20.0


def test_the_last_event_tells_the_requests_times_however_late_it_is_read(core: Any) -> None:
    began = time.perf_counter()
    ids = [core.submit(prompt([i]), params(max_tokens=60)) for i in (1, 2)]
    core.cancel(ids[1])
    while core.stats()["running"] or core.stats()["waiting"]:
        time.sleep(0.001)
    most = time.perf_counter() - began
    time.sleep(0.3)
    events = {event.request_id: event for event in core.poll(30.0)}
    whole, cancelled = (events[i] for i in ids)
    assert len(whole.token_ids) == 60
    assert 0 < whole.first_token_seconds < whole.seconds <= most
    assert 0 <= cancelled.first_token_seconds <= cancelled.seconds <= most


def test_shutdown_cancels_and_later_calls_say_so(engine_folder: Path) -> None:
    core = _core.Engine(**arguments(engine_folder))
    ids = [core.submit(prompt([1]), params(max_tokens=95)) for _ in range(50)]
    core.shutdown()
    outcomes = finish(core, ids, seconds=5)
    assert {outcome.finish_reason for outcome in outcomes.values()} <= {"cancelled", "length"}
    with pytest.raises(_core.EngineDeadError, match="shut down"):
        core.submit(prompt([1]), params())
    core.shutdown()


def test_a_full_queue_is_its_own_error(engine_folder: Path) -> None:
    made = arguments(engine_folder)
    made["options"] = {"max_queue_size": 2, "max_batch_size": 1}
    core = _core.Engine(**made)

    def flood() -> None:
        for _ in range(2000):
            core.submit(prompt([1]), params(max_tokens=95))

    with pytest.raises(_core.QueueFullError, match="2 requests are waiting already"):
        flood()
    core.shutdown()


def test_stats_and_the_trace_tell_the_composition_of_steps(core: Any) -> None:
    generate(core, [1] * 20, max_tokens=3)
    stats = core.stats(recent_steps=10)
    steps = stats["recent_steps"]
    assert [step["prefill_tokens"] for step in steps] == [16, 4, 0, 0]
    assert [step["decode_tokens"] for step in steps] == [0, 0, 1, 1]
    assert stats["last_step"] == steps[-1]
    assert stats["steps"] == 4
    assert stats["prompt_tokens"] == 20
    assert stats["generated_tokens"] == 3
    assert stats["kv_blocks_total"] == stats["kv_blocks_free"] == 12
    assert stats["kv_blocks_limited_by"] == "limits"
    assert stats["kv_bytes"] == 12 * 32 * 2 * 2 * 8 * 4  # blocks, tokens, k and v, heads, dim, float32


def test_bf16_weights_and_cache_stay_near_the_float64_model(tmp_path: Path) -> None:
    core = _core.Engine(**arguments(tiny.write_tiny_engine(tmp_path / "bf16", "bf16", golden=False)))
    tokens = [(11 * i + 5) % 50 for i in range(40)]
    outcome = generate(core, tokens, max_tokens=1, context_logits=True)
    expected = tiny.TinyModel("bf16").logits(tokens, range(40))
    assert outcome.context_logits is not None
    # the weights are exact in bf16; the cache rounds keys and values to 8 bits
    assert np.abs(outcome.context_logits - expected).max() < 0.03 * np.abs(expected).max()
    core.shutdown()
