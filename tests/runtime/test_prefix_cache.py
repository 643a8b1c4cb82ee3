"""What the core finds in its KV cache: the same numbers as without, and only what may be shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.runtime import _core
from core_engine import finish, held, params, prompt

TOKENS = [(11 * i + 2) % 50 for i in range(90)]


def run(core: Any, tokens: list[int], salt: bytes = b"", **fields: Any) -> tuple[Any, int]:
    """The outcome of one request, and how many of its tokens came from the cache."""
    before = core.stats()["prefix_cached_tokens"]
    request = core.submit(prompt(tokens), params(**fields), 0, salt)
    outcome = finish(core, [request])[request]
    assert outcome.error == ""
    return outcome, core.stats()["prefix_cached_tokens"] - before


def test_a_warm_prefix_gives_the_same_bits_as_a_cold_one(start: Any) -> None:
    core = start()
    fields = {"max_tokens": 6, "logprobs": 5, "temperature": 1.3, "seed": 3}
    cold, found = run(core, TOKENS, **fields)
    assert found == 0
    # Two whole blocks; none; a part of the first block; all but the last token of a block.
    for tokens, expected in (
        (TOKENS, 64),
        ([1, *TOKENS[1:]], 0),
        (TOKENS[:20], 19),
        ([*TOKENS[:40], 9, *TOKENS[41:]], 40),
        (TOKENS[:64], 63),
    ):
        warm, found = run(core, tokens, **fields)
        assert found == expected
        other = start(prefix_caching=False)
        alone, found = run(other, tokens, **fields)
        assert found == 0
        assert warm.token_ids == alone.token_ids
        assert [x.logprob for x in warm.logprobs] == [x.logprob for x in alone.logprobs]
        assert [x.top for x in warm.logprobs] == [x.top for x in alone.logprobs]
        if tokens is TOKENS:
            assert warm.token_ids == cold.token_ids
            assert [x.top for x in warm.logprobs] == [x.top for x in cold.logprobs]


def test_each_turn_of_a_conversation_computes_what_is_new(start: Any) -> None:
    core, cold = start(), start(prefix_caching=False)
    history, before = [3, 1, 4], 1
    for turn in range(6):
        history += [(turn * 7 + i) % 50 for i in range(5)]
        outcome, found = run(core, history, max_tokens=9)
        assert outcome.token_ids == run(cold, history, max_tokens=9)[0].token_ids
        # Of the turns before, all full blocks; the last token was never fed.
        assert found >= (before - 1) // 32 * 32
        history += outcome.token_ids
        before = len(history)
    assert core.stats()["prefix_cached_tokens"] > cold.stats()["prefix_cached_tokens"] == 0


def test_salts_keep_tenants_apart(start: Any) -> None:
    core = start()
    ours, theirs = bytes(range(16)), bytes(15) + b"\1"
    assert run(core, TOKENS, ours, max_tokens=2)[1] == 0
    assert run(core, TOKENS, theirs, max_tokens=2)[1] == 0
    assert run(core, TOKENS, max_tokens=2)[1] == 0
    assert run(core, TOKENS, ours, max_tokens=2)[1] == 64
    with pytest.raises(ValueError, match="cache_salt has 3 bytes; expected 16 or none"):
        core.submit(prompt([1]), params(), 0, b"abc")


def test_context_logits_are_computed_whatever_the_cache_holds(start: Any) -> None:
    core = start()
    run(core, TOKENS, max_tokens=1)
    outcome, found = run(core, TOKENS, max_tokens=1, context_logits=True)
    assert found == 0
    fresh, _ = run(start(prefix_caching=False), TOKENS, max_tokens=1, context_logits=True)
    np.testing.assert_array_equal(outcome.context_logits, fresh.context_logits)


def test_requests_with_a_common_beginning_compute_it_once(start: Any) -> None:
    core = start()
    ids = [core.submit(prompt([*TOKENS[:70], i]), params(max_tokens=4)) for i in range(12)]
    outcomes = finish(core, ids)
    stats = core.stats()
    # Whoever comes second waits for the blocks that the first one is computing. Their last tokens differ.
    assert stats["prefix_cached_tokens"] >= 11 * 64
    assert stats["prompt_tokens"] <= 71 + 11 * (71 - 64)
    cold = start(prefix_caching=False)
    for i, request in enumerate(ids):
        assert outcomes[request].token_ids == run(cold, [*TOKENS[:70], i], max_tokens=4)[0].token_ids


def test_used_cached_and_free_blocks_are_told_apart(start: Any) -> None:
    core = start(kv_cache_blocks=5)
    run(core, TOKENS, max_tokens=1)
    stats = core.stats()
    assert (stats["kv_blocks_used"], stats["kv_blocks_cached"], stats["kv_blocks_free"]) == (0, 2, 3)
    run(core, [7, *TOKENS[1:], 1, 2], max_tokens=4)
    run(core, [8, *TOKENS[1:], 1, 2], max_tokens=4)
    stats = core.stats()
    assert stats["kv_blocks_used"] == 0
    assert stats["kv_blocks_cached"] + stats["kv_blocks_free"] == 5
    assert stats["kv_blocks_evicted"] > 0
    assert stats["kv_integrity_error"] == ""


def test_preempted_requests_say_what_they_say_alone(start: Any) -> None:
    core = start(kv_cache_blocks=4, capacity_scheduler_policy="max_utilization")
    cold = start(prefix_caching=False)
    given = [
        ([(3 * n + i) % 50 for i in range(8 + n)], {"max_tokens": 70, "logprobs": 2, **sampled})
        for n, sampled in enumerate(
            ({}, {"temperature": 1.0, "seed": 4}, {"repetition_penalty": 1.4}, {"frequency_penalty": 0.7}) * 2
        )
    ]
    expected = [run(cold, tokens, **fields)[0] for tokens, fields in given]
    with held(core) as first:  # they begin together, and there is no room for all
        ids = [core.submit(prompt(tokens), params(**fields)) for tokens, fields in given]
    outcomes = finish(core, [first, *ids])
    for request, alone in zip(ids, expected, strict=True):
        assert outcomes[request].token_ids == alone.token_ids
        assert [x.top for x in outcomes[request].logprobs] == [x.top for x in alone.logprobs]
    stats = core.stats()
    assert stats["preemptions"] > 0
    assert stats["recomputed_tokens"] > 0


def test_priorities_decide_who_runs_first(start: Any) -> None:
    core = start(max_batch_size=1, scheduling_policy="priority")
    order = []
    with held(core) as first:
        ids = {core.submit(prompt([1]), params(max_tokens=3), n): n for n in (5, -2, 3)}
    while len(order) < 4:
        order += [e.request_id for e in core.poll(0.5) if e.finished]
    assert order[0] == first
    assert [ids[i] for i in order[1:]] == [-2, 3, 5]
    with pytest.raises(ValueError, match="priority is 1, and this engine serves requests as they come"):
        start().submit(prompt([1]), params(), 1)


def test_the_queue_is_bounded_by_tokens_too(start: Any) -> None:
    core = start(max_batch_size=1, max_queued_tokens=100)
    with held(core):
        for _ in range(3):
            core.submit(prompt(TOKENS[:30]), params(max_tokens=5))
        with pytest.raises(_core.QueueFullError, match=r"\d+ tokens are waiting already, and max_queued"):
            core.submit(prompt(TOKENS[:30]), params(max_tokens=5))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("scheduling_policy", "lifo", 'is .lifo.; expected "fcfs" or "priority"'),
        ("capacity_scheduler_policy", 1, "expected"),
        ("prefix_caching", "yes", "expected"),
        ("max_queued_tokens", -1, "expected"),
    ],
)
def test_options_that_make_no_sense_are_refused(start: Any, option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(**{option: value})


def check_conversations(core: Any, cold: Any, count: int) -> None:
    """Three turns of each: found again from the second on, and bit for bit as without a cache."""
    fields = {"max_tokens": 4, "logprobs": 5}
    prompts = [[(11 * i + n) % 50 for i in range(90)] for n in range(count)]
    for turn in range(3):
        for tokens in prompts:
            outcome, found = run(core, tokens, **fields)
            assert found == (64 if turn > 0 else 0)
            expected, _ = run(cold, tokens, **fields)
            assert outcome.token_ids == expected.token_ids
            assert [x.top for x in outcome.logprobs] == [x.top for x in expected.logprobs]


def test_what_comes_back_from_the_host_tier_is_what_was_computed(start: Any) -> None:
    """Three conversations in a pool that holds one: bit for bit as in an engine without a cache."""
    core = start(kv_cache_blocks=5, host_tier_bytes=1 << 20)
    check_conversations(core, start(prefix_caching=False), 3)
    stats = core.stats()
    assert stats["kv_host_blocks"] > 0
    assert stats["kv_host_blocks_saved"] == stats["kv_host_blocks"]
    assert stats["kv_host_tokens_restored"] == 32 * stats["kv_host_blocks_restored"] >= 5 * 64
    assert stats["kv_host_bytes"] <= 1 << 20
    assert stats["kv_disk_blocks_total"] == 0


def test_what_comes_back_from_the_disk_is_what_was_computed(start: Any, tmp_path: Path) -> None:
    """Six conversations; the host tier has room for two and a half of them."""
    sizes = start(kv_cache_blocks=1, host_tier_bytes=1 << 20).stats()
    block = sizes["kv_host_bytes"] // sizes["kv_host_blocks_total"]
    core = start(
        kv_cache_blocks=5,
        host_tier_bytes=5 * block,
        disk_tier_bytes=50 * block,
        disk_tier_folder=str(tmp_path),
    )
    check_conversations(core, start(prefix_caching=False), 6)
    stats = core.stats()
    assert stats["kv_host_blocks"] == 5
    assert stats["kv_disk_blocks"] == stats["kv_disk_blocks_spilled"] >= 5
    assert stats["kv_disk_blocks_fetched"] >= 8
    assert stats["kv_disk_error"] == ""
    assert list(tmp_path.iterdir()) == []


def test_a_disk_tier_that_cannot_be_made_is_refused(start: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_disk_folder is .*missing.*: No such file"):
        start(host_tier_bytes=1 << 20, disk_tier_bytes=1 << 20, disk_tier_folder=str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"kv_cache_disk_tier.* has no room for"):
        start(host_tier_bytes=1 << 20, disk_tier_bytes=1 << 60, disk_tier_folder=str(tmp_path))
    with pytest.raises(ValueError, match="give that as well"):
        start(disk_tier_bytes=1 << 20, disk_tier_folder=str(tmp_path))
