"""Steps as a Chrome trace, and sessions that notice a dead core."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from castiron.runtime.sampling_params import SamplingParams
from castiron.runtime.step_trace import chrome_trace
from core_engine import generate
from fake_core import FakeEvent, make_session

from castiron.errors import EngineError


def test_steps_follow_each_other_in_the_trace(start: Any) -> None:
    core = start()
    generate(core, [1, 2, 3], max_tokens=5)
    trace = json.loads(json.dumps(chrome_trace(core.stats(1024)["recent_steps"])))
    steps = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == 1]
    assert [e["name"] for e in steps] == [f"step {i}" for i in range(1, 6)]
    assert [e["args"]["prefill_tokens"] for e in steps] == [3, 0, 0, 0, 0]
    assert [e["args"]["decode_tokens"] for e in steps] == [0, 1, 1, 1, 1]
    for earlier, later in itertools.pairwise(steps):
        # Microseconds as doubles of seconds: exact to far less than a nanosecond.
        assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-3
    phases = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] in (2, 3)]
    assert [e["name"] for e in phases[:5]] == ["take in", "schedule", "draft", "device", "sample"]
    assert [e["tid"] for e in phases[:5]] == [2, 2, 2, 3, 2]


def test_a_step_started_ahead_is_drawn_where_the_device_came_to_it() -> None:
    counts = dict.fromkeys(("running", "waiting", "kv_blocks_used", "kv_blocks_cached"), 1) | {
        "decode_tokens": 1,
        "prefill_tokens": 0,
        "cached_tokens": 0,
        "draft_tokens": 0,
        "accepted_tokens": 0,
    }
    first = {"step": 1, "start_s": 0.0, "intake_s": 1e-6, "schedule_s": 2e-6, "queued_s": 0.0}
    second = {"step": 2, "start_s": 4e-6, "intake_s": 1e-6, "schedule_s": 2e-6, "queued_s": 96e-6}
    first |= {"draft_s": 0.0, "forward_s": 100e-6, "sample_s": 5e-6, "ahead": False}
    second |= {"draft_s": 0.0, "forward_s": 50e-6, "sample_s": 5e-6, "ahead": True}
    events = chrome_trace([first | counts, second | counts])["traceEvents"]
    device = [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 3]
    assert device == [pytest.approx((3, 100)), pytest.approx((103, 50))]
    steps = [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert steps == [pytest.approx((0, 108)), pytest.approx((103, 55))]


def test_a_session_whose_core_died_says_so() -> None:
    session = make_session()
    core = session.core
    updates = []
    core.poll = lambda _: [FakeEvent(1, finished=True, finish_reason="error", error="step 3 hangs")]
    core.stats = lambda recent_steps=0: {"dead": "step 3 hangs"}
    session.submit([1, 2], SamplingParams(max_tokens=2, detokenize=False), updates.append)
    while not updates:
        pass
    assert updates[0].error == "step 3 hangs"
    assert session.failure == "step 3 hangs"
    with pytest.raises(EngineError, match="the engine stopped working: step 3 hangs; restart it"):
        session.submit([1, 2], SamplingParams(max_tokens=2, detokenize=False), updates.append)
    session.close()
