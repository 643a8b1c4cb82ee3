"""castiron bench over the twin of the core, whose step time is known."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtime"))

from castiron.runtime import loading
from castiron.runtime.bench import measure_latency, measure_throughput, percentiles, random_prompts, run_round
from fake_core import FakeCore, make_session

from castiron.cli import main

STEP = 0.004


@pytest.fixture
def core(monkeypatch):
    made = FakeCore(step_seconds=STEP, max_batch_size=8)
    monkeypatch.setattr(loading, "open_session", lambda *a, **k: make_session(made))
    return made


def bench(*args):
    return CliRunner().invoke(main, ["bench", *map(str, args)])


def test_latency_reports_what_the_steps_take(core):
    sizes = ("--input-len", 10, "--output-len", 6, "--batch-size", 2, "--num-iters", 3)
    result = bench("latency", "E", *sizes, "--json")
    data = json.loads(result.stdout)
    # A step never takes less than the twin sleeps, so times are bounded from below and rates from above.
    assert data["ttft_ms"] >= STEP * 1e3
    assert 0 < data["prefill_tokens_per_s"] <= 20 / STEP
    assert 0 < data["decode_tokens_per_s"] <= 2 * 5 / (5 * STEP)
    assert data["latency_ms"] >= 6 * STEP * 1e3
    assert data["batch_size"] == 2


def test_throughput_reports_rates_that_fit_together(core):
    sizes = (
        "--input-len",
        12,
        "--output-len",
        4,
        "--num-prompts",
        6,
        "--max-concurrency",
        2,
        "--num-iters",
        1,
    )
    data = json.loads(bench("throughput", "E", *sizes, "--json").stdout)
    assert data["output_tokens_per_s"] == pytest.approx(data["request_throughput"] * 4)
    assert data["total_tokens_per_s"] == pytest.approx(data["request_throughput"] * 16)
    assert data["duration_s"] >= 3 * 4 * STEP
    assert set(data["latency_ms"]) == {"mean", "p10", "p50", "p90", "p99"}


def test_tables_are_printed_without_json(core):
    sizes = ("--input-len", 4, "--output-len", 3, "--num-iters", 1)
    assert "tokens/s" in bench("latency", "E", *sizes).stdout
    core.closed = False
    result = bench("throughput", "E", "--num-prompts", 2, *sizes)
    assert "p99" in result.stdout, result.stderr


def test_every_prompt_is_its_own_and_greedy_and_ignores_eos(core):
    bench("throughput", "E", "--input-len", 8, "--output-len", 2, "--num-prompts", 5, "--num-iters", 2)
    prompts = [tuple(p) for p, _ in core.submitted]
    assert len(set(prompts)) == len(prompts)
    assert all(p.temperature == 0 and p.stop_token_ids == [] for _, p in core.submitted)


def test_concurrency_is_kept():
    core = FakeCore(step_seconds=0.001)
    seen = []
    inner = core._step
    core._step = lambda r: (seen.append(len(core._running)), inner(r))[1]
    session = make_session(core)
    import random

    run_round(session, random_prompts(9, 4, 300, random.Random(1)), 5, max_concurrency=3)
    session.close()
    assert max(seen) == 3


class AllAtOnce(FakeCore):
    """Gives all tokens of a request in one event, as a process sees them that gets no CPU between."""

    def _step(self, r):
        events = [super(AllAtOnce, self)._step(r) for _ in range(r.params.max_tokens)]
        tokens = [token for event in events for token in event.token_ids]
        return replace(events[-1], token_ids=tokens, first_token_seconds=0.1, seconds=0.5)


def test_speeds_are_by_the_clock_of_the_engine_and_not_by_when_tokens_are_seen():
    session = make_session(AllAtOnce())
    sizes = {"input_len": 10, "output_len": 5, "num_iters": 1, "num_warmup": 0}
    found = measure_latency(session, batch_size=1, **sizes)
    assert found.ttft_ms == pytest.approx(100)
    assert found.latency_ms == pytest.approx(500)
    assert found.decode_tokens_per_s == pytest.approx(4 / 0.4)
    assert found.tpot_ms == pytest.approx(100)
    many = measure_throughput(session, num_prompts=3, max_concurrency=None, **sizes)
    assert many.tpot_ms["p50"] == pytest.approx(100)
    session.close()


def test_sizes_over_the_engine_are_refused(core):
    result = bench("latency", "E", "--input-len", 250, "--output-len", 10)
    assert result.exit_code == 1
    assert "max_seq_len is 256" in result.stderr
    assert (
        "--batch-size is 9"
        in bench("latency", "E", "--batch-size", 9, "--input-len", 4, "--output-len", 1).stderr
    )


def test_percentiles_are_those_of_numpy():
    np = pytest.importorskip("numpy")
    values = [5.0, 1.0, 9.5, 3.25, 7.0]
    for p in (10, 50, 90, 99):
        assert percentiles(values)[f"p{p}"] == pytest.approx(np.percentile(values, p))
    assert percentiles([]) == {}
