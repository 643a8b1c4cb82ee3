"""OpenTelemetry spans of requests."""

from __future__ import annotations

import httpx
import live_server
import pytest
from castiron.runtime.server.front import FrontConfig
from castiron.runtime.server.tracing import OutputTimes, Tracer
from fake_core import FakeCore
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def spans(folder):
    """Runs requests against a server that traces, and returns the spans by name."""

    def run(*requests, core=None):
        core = core or FakeCore(step_seconds=0.005)
        exporter = InMemorySpanExporter()
        front = FrontConfig(tracer=Tracer("", exporter=exporter))
        with live_server.serve(core, tokenizer_dir=folder, front=front) as (url, _):
            for method, path, options in requests:
                httpx.request(method, url + path, timeout=20, **options)
        found = {}
        for span in exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found

    return run


def completion(**fields):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    body = {"prompt": [5, 6], "max_tokens": 8, **fields}
    return "POST", "/v1/completions", {"json": body, "headers": headers}


def test_a_request_has_a_span_below_the_clients_and_its_outputs_have_three_each(spans):
    found = spans(completion(n=2))
    assert {name: len(these) for name, these in found.items()} == {
        "POST /v1/completions": 1,
        "queue": 2,
        "prefill": 2,
        "decode": 2,
    }
    (request,) = found["POST /v1/completions"]
    assert format(request.context.trace_id, "032x") == TRACE
    assert format(request.parent.span_id, "016x") == PARENT
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["castiron.request_id"] == "mine"
    assert request.attributes["gen_ai.usage.input_tokens"] == 2
    assert request.attributes["gen_ai.usage.output_tokens"] == 16
    for k in range(2):
        queue, prefill, decode = (
            next(s for s in found[name] if s.attributes["castiron.output"] == k)
            for name in ("queue", "prefill", "decode")
        )
        assert all(s.parent.span_id == request.context.span_id for s in (queue, prefill, decode))
        assert request.start_time <= queue.start_time <= queue.end_time == prefill.start_time
        assert prefill.end_time == decode.start_time < decode.end_time <= request.end_time
        assert decode.end_time - decode.start_time > 7 * 4e6  # seven steps of 5 ms
        assert decode.attributes["gen_ai.response.finish_reasons"] == ("length",)


class QueuedByLength(FakeCore):
    """Requests waited as many milliseconds as their prompt has tokens."""

    def _step(self, r):
        event = super()._step(r)
        event.queue_seconds = 0.001 * r.prompt
        return event


def test_the_best_of_several_tells_how_long_its_own_prompt_waited(spans):
    best = completion(prompt=[[5], [5, 6, 7, 8]], best_of=3, temperature=1.0)
    queues = {s.attributes["castiron.output"]: s for s in spans(best, core=QueuedByLength())["queue"]}
    waited = [(queues[k].end_time - queues[k].start_time) / 1e6 for k in range(2)]
    assert waited == pytest.approx([1.0, 4.0], abs=0.01)


def test_refused_requests_have_spans_and_probes_have_none(spans):
    found = spans(("GET", "/health", {}), ("GET", "/metrics", {}), completion(max_tokens=-1))
    assert list(found) == ["POST /v1/completions"]
    assert found["POST /v1/completions"][0].attributes["http.response.status_code"] == 400


def test_prompts_are_in_no_span(spans):
    found = spans(completion(prompt="hello secret"))
    assert "secret" not in repr([s.to_json() for these in found.values() for s in these])


@pytest.mark.parametrize(
    ("started", "first", "names"),
    [(None, None, ["queue"]), (1.0, None, ["queue", "prefill"]), (1.0, 2.0, ["queue", "prefill", "decode"])],
)
def test_an_output_that_ended_early_has_the_phases_that_it_came_to(started, first, names):
    times = OutputTimes(0, 0.0, started, first, 3.0, 0, "cancelled")
    phases = times.phases()
    assert [name for name, _, _ in phases] == names
    assert phases[0][1] == 0.0
    assert phases[-1][2] == 3.0
