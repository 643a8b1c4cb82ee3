"""castiron bench serve: its definitions by hand-made times, its client by a server of known delays."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from contextlib import contextmanager

import pytest

pytest.importorskip("aiohttp", reason="needs castiron[bench]")

import itertools

import slow_server
from castiron.runtime.serving_bench.benchmark import Benchmark
from castiron.runtime.serving_bench.client import Client, Target
from castiron.runtime.serving_bench.datasets import Shape, make_dataset, read_dataset
from castiron.runtime.serving_bench.events import EventParser
from castiron.runtime.serving_bench.load import Load, Measured
from castiron.runtime.serving_bench.outcome import Outcome
from castiron.runtime.serving_bench.report import table
from castiron.runtime.serving_bench.summary import error_counts, summarize, tokens_by_second
from castiron.runtime.serving_bench.words import PromptMaker
from castiron.runtime.tokenizer import Tokenizer

from castiron.errors import RequestError


@contextmanager
def no_progress(_total):
    yield lambda _: None


def measure(url, endpoint="/v1/completions", dataset="random", load=None, model="m", **shape):
    sizes = {"num_prompts": 4, "input_len": 5, "output_len": 6, **shape}
    made = Benchmark(Target(url, endpoint, model), dataset, Shape(**sizes), load or Load())
    return asyncio.run(made.measure(made.conversations(), no_progress))[1]


def outcome(started, times, ended, tokens, error=None):
    return Outcome(started, times, ended, 10, tokens, True, "", error)


#: Four requests of hand-made times, in seconds, and a failed one.
BY_HAND = Measured(
    [
        outcome(0.0, [0.1, 0.15, 0.2], 0.25, 3),
        outcome(0.0, [0.2, 0.4], 0.4, 5),  # five tokens in two events
        outcome(0.5, [0.8], 0.8, 1),
        outcome(1.0, [1.4, 1.5], 1.5, 2),
        outcome(1.0, [], 2.0, 0, "HTTP 429: full"),
    ],
    started=0.0,
    duration=2.0,
)


def test_latencies_are_those_of_the_definitions():
    found = summarize(BY_HAND, percentiles=(0, 50, 99, 100), goodput={})
    # first tokens after 100, 200, 300 and 400 ms; p99 lies 0.97 of the way from the third to the fourth
    assert found["mean_ttft_ms"] == pytest.approx(250)
    assert found["median_ttft_ms"] == found["p50_ttft_ms"] == pytest.approx(250)
    assert found["p99_ttft_ms"] == pytest.approx(397)
    assert found["std_ttft_ms"] == pytest.approx(statistics.pstdev([100, 200, 300, 400]))
    # tokens after the first: 100 ms / 2, 200 ms / 4, none, 100 ms / 1
    assert found["mean_tpot_ms"] == pytest.approx(200 / 3)
    assert found["p100_tpot_ms"] == pytest.approx(100)
    # gaps 50, 50, 200 and 100 ms
    assert found["mean_itl_ms"] == pytest.approx(100)
    assert found["median_itl_ms"] == pytest.approx(75)
    assert found["p0_e2el_ms"] == pytest.approx(250)
    assert found["p100_e2el_ms"] == pytest.approx(500)


def test_totals_count_successful_requests_alone():
    found = summarize(BY_HAND, percentiles=(), goodput={"ttft": 250, "tpot": 60})
    assert (found["completed"], found["failed"]) == (4, 1)
    assert found["total_input_tokens"] == 40
    assert found["total_output_tokens"] == 11
    assert found["request_throughput"] == pytest.approx(4 / 2)
    assert found["output_throughput"] == pytest.approx(11 / 2)
    assert found["total_token_throughput"] == pytest.approx(51 / 2)
    assert found["request_goodput"] == pytest.approx(2 / 2)
    assert found["max_concurrent_requests"] == 2
    assert tokens_by_second(BY_HAND.outcomes[:4], 0.0) == pytest.approx([9, 2])
    assert found["max_output_tokens_per_s"] == pytest.approx(9)
    assert error_counts(BY_HAND.outcomes) == [("HTTP 429: full", 1)]


def test_the_table_is_50_wide_and_says_where_there_is_no_value():
    lonely = Measured([outcome(0.0, [0.1], 0.1, 1)], 0.0, 0.1)
    figures = summarize(lonely, percentiles=(99,), goodput={})
    text = table({"request_rate": "inf", **figures}, ["ttft", "itl"], [99])
    assert all(len(line) <= 50 for line in text.splitlines())
    assert "P99 TTFT (ms):                           100.00" in text
    assert text.splitlines()[-2] == "no request has a value"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_known_delays_are_measured(endpoint):
    behaviour = slow_server.Behaviour(first_delay=0.2, gap=0.02)
    with slow_server.serve(behaviour) as (url, bodies):
        measured = measure(url, endpoint, load=Load(max_concurrency=1))
    assert len(bodies) == 5  # and one before, to see that the server works
    late = []
    for number, each in enumerate(measured.outcomes, 1):
        late += [came - sent for came, sent in zip(each.token_times, behaviour.sent[number], strict=True)]
        assert each.ttft >= 0.2
        assert each.e2el >= 0.2 + 5 * 0.02
    # Nothing comes before it was sent, and what a busy machine adds is no matter of delays that add up.
    assert min(late) > 0
    assert statistics.median(late) < 0.1
    found = summarize(measured, percentiles=(), goodput={})
    assert (found["total_output_tokens"], found["total_input_tokens"]) == (24, 28)


def test_an_event_of_several_tokens_is_one_gap_and_several_tokens():
    with slow_server.serve(slow_server.Behaviour(gap=0.04, tokens_per_event=2)) as (url, _):
        measured = measure(url, output_len=8)
    for each in measured.outcomes:
        assert len(each.itls) == 3
        assert each.tpot == pytest.approx(sum(each.itls) / 7)


def test_without_usage_events_with_text_are_counted():
    with slow_server.serve(slow_server.Behaviour(usage=False)) as (url, _):
        measured = measure(url)
    assert [o.output_tokens for o in measured.outcomes] == [6] * 4
    assert not any(o.counted_by_server for o in measured.outcomes)


def test_failures_of_every_kind_are_counted_and_take_no_other_request_with_them():
    behaviour = slow_server.Behaviour(refuse={1}, break_off={2}, fail={3})
    with slow_server.serve(behaviour) as (url, _):
        measured = measure(url, load=Load(max_concurrency=1), num_prompts=5)
    assert dict(error_counts(measured.outcomes)) == {
        "HTTP 429: the queue is full": 1,
        "the stream ended before the answer did (no finish_reason)": 1,
        "in the stream: the engine failed": 1,
    }
    assert summarize(measured, percentiles=(), goodput={})["completed"] == 2


def test_a_server_that_refuses_the_test_request_or_is_not_there_is_an_error():
    with (
        slow_server.serve(slow_server.Behaviour(refuse={0})) as (url, _),
        pytest.raises(RequestError, match=r"test request .* failed: HTTP 429: the queue is full"),
    ):
        measure(url)
    with pytest.raises(RequestError, match="no server answers at"):
        measure(url)


def test_no_more_requests_are_under_way_than_allowed():
    with slow_server.serve(slow_server.Behaviour(gap=0.01)) as (url, _):
        found = summarize(
            measure(url, load=Load(max_concurrency=2), num_prompts=7), percentiles=(), goodput={}
        )
    assert found["max_concurrent_requests"] == 2


def test_later_turns_hold_the_answers_before_them():
    with slow_server.serve(slow_server.Behaviour()) as (url, bodies):
        measured = measure(
            url, "/v1/chat/completions", "multi-turn", num_prompts=5, num_turns=3, output_len=2
        )
    assert len(measured.outcomes) == 5
    sent = sorted((b["messages"] for b in bodies[1:]), key=len)
    assert [len(m) for m in sent] == [1, 1, 3, 3, 5]
    assert [m["role"] for m in sent[4]] == ["user", "assistant"] * 2 + ["user"]
    assert [m["content"] for m in sent[4][1::2]] == ["w0 w1 "] * 2


def test_a_turn_after_a_failed_one_is_not_sent_and_counts_as_failed():
    with slow_server.serve(slow_server.Behaviour(refuse={2})) as (url, bodies):
        measured = measure(url, dataset="multi-turn", num_prompts=3, num_turns=3)
    assert len(bodies) == 3
    assert [o.error for o in measured.outcomes] == [
        None,
        "HTTP 429: the queue is full",
        "not sent: the turn before it failed",
    ]


def test_arrivals_have_the_rate_and_the_spread_that_were_asked_for():
    rng = random.Random(5)
    for burstiness in (0.5, 1.0, 4.0):
        times = Load(20.0, burstiness).arrivals(20_001, rng)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        # a gamma distribution's coefficient of variation is shape ** -0.5
        assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
        assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert Load().arrivals(3, rng) == [0, 0, 0]


def test_with_a_tokenizer_prompts_have_exactly_the_length(folder):
    tokenizer = Tokenizer(folder)
    maker = PromptMaker(random.Random(1), lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
    for length in (20, 57, 200):
        count = len(tokenizer.encode(maker.text(length), add_special_tokens=False))
        # This vocabulary of 300 spells most words out, so that the last word may leave room for no other.
        assert length - 8 < count <= length


def test_prompts_of_a_shared_prefix_begin_alike_and_go_on_differently():
    rng = random.Random(2)
    shape = Shape(6, input_len=4, output_len=3, prefix_len=10, num_prefixes=2)
    turns = [
        c[0].messages[0]["content"].split()
        for c in make_dataset("shared-prefix", shape, PromptMaker(rng), rng)
    ]
    assert {len(words) for words in turns} == {14}
    assert len({tuple(words[:10]) for words in turns}) == 2
    assert len({tuple(words[10:]) for words in turns}) == 6


def test_lengths_are_drawn_within_the_ratio():
    rng = random.Random(3)
    shape = Shape(300, input_len=20, output_len=10, range_ratio=0.5)
    made = [c[0] for c in make_dataset("random", shape, PromptMaker(rng), rng)]
    assert {t.output_len for t in made} == set(range(5, 16))
    assert {len(t.messages[0]["content"].split()) for t in made} == set(range(10, 31))


def test_a_file_gives_prompts_conversations_and_lengths(tmp_path):
    path = tmp_path / "d.jsonl"
    lines = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}], "output_len": 3}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = read_dataset(path, Shape(9, 1, output_len=5), chat=True)
    assert [(c[0].messages[0]["content"], c[0].output_len) for c in found] == [("a", 5), ("b", 3)]
    with pytest.raises(RequestError, match="line 2 has messages; send them to"):
        read_dataset(path, Shape(9, 1, 1), chat=False)
    for line, message in (
        ("{", "line 1 is no JSON"),
        ('{"text": "a"}', 'neither a text as "prompt" nor'),
        ('{"prompt": "a", "output_len": 0}', "output_len is 0"),
        ("", "holds no request"),
    ):
        path.write_text(line)
        with pytest.raises(RequestError, match=message):
            read_dataset(path, Shape(9, 1, 1), chat=True)


def test_events_are_read_however_the_stream_is_cut():
    stream = b": hello\r\n\r\ndata: {}\r\n\r\ndata:a\ndata: b\n\nevent: x\ndata: [DONE]\n\n"
    for size in (1, 2, 3, 7, len(stream)):
        parser = EventParser()
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [e for p in pieces for e in parser.feed(p)] == [b"{}", b"a\nb", b"[DONE]"]


def test_our_own_server_is_measured(server):
    for endpoint in ("/v1/completions", "/v1/chat/completions"):
        measured = measure(server[0], endpoint, model="alias", num_prompts=6, output_len=5)
        assert error_counts(measured.outcomes) == []
        assert all(o.counted_by_server and o.output_tokens <= 5 for o in measured.outcomes)
        assert all(o.prompt_tokens and o.started < o.token_times[0] <= o.ended for o in measured.outcomes)


def test_the_real_engine_is_measured(engine_server):
    # The tiny engine has no tokenizer: its prompts are token ids, and so are its answers.
    body = {"prompt": [5, 9, 2, 30], "return_token_ids": True, "ignore_eos": True}
    target = Target(engine_server[0], "/v1/completions", "", extra_body=body)
    made = Benchmark(target, "random", Shape(9, 4, 7), Load(max_concurrency=3))
    name, measured = asyncio.run(made.measure(made.conversations(), no_progress))
    assert name == "fake"
    assert error_counts(measured.outcomes) == []
    assert [(o.prompt_tokens, o.output_tokens) for o in measured.outcomes] == [(4, 7)] * 9
    assert all(len(o.token_times) <= 7 for o in measured.outcomes)


def test_other_paths_are_refused():
    with pytest.raises(RequestError, match="expected a path that ends in /completions"):
        Client(Target("http://x", "/v1/embeddings", "m"))
