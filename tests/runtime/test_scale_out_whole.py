"""What holds for one engine holds for several replicas at one address: keys, the engine, errors' forms."""

from __future__ import annotations

import asyncio
import json

import pytest
from castiron.runtime.async_engine import AsyncEngine
from castiron.runtime.scale_out.replicas import Replicas
from castiron.runtime.server.api_keys import ApiKey, ApiKeys
from castiron.runtime.server.app import make_app
from castiron.runtime.server.error_forms import error_response
from castiron.runtime.server.front import Front, FrontConfig
from castiron.runtime.server.service import ServerConfig, Service
from castiron.runtime.server.tracing import Tracer
from fake_core import FakeCore, make_session
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import Request
from starlette.responses import JSONResponse
from test_scale_out import Handle, http, with_front

KEYS = {"a": "sk-aaaaaaaa", "b": "sk-bbbbbbbb"}


def replica(folder, **core):
    session = make_session(FakeCore(**core), tokenizer_dir=folder)
    return Service(AsyncEngine(session), ServerConfig(("fake",)))


def with_keys(folder, work, count=2, limit=None, **core):
    """Runs ``work(ask, front)`` with real applications behind the front of one process."""

    async def main():
        services = [replica(folder, **core) for _ in range(count)]
        front = Replicas([Handle(make_app(service)) for service in services], "first", 1 << 20)
        keys = ApiKeys([ApiKey(name, key, None, limit) for name, key in KEYS.items()])
        app = Front(front.app(), FrontConfig(keys), error_response)

        async def ask(key, path="/v1/completions", body=None, method="POST"):
            return await answer(app, path, body, method, {"authorization": f"Bearer {KEYS[key]}"})

        try:
            await work(ask, front)
        finally:
            for service in services:
                await service.close()

    asyncio.run(asyncio.wait_for(main(), 30))


async def answer(app, path, body=None, method="POST", headers=None):
    """Status and parsed body, or the text of a stream."""
    data = json.dumps(body or {}).encode()
    scope = http(method, path, data).scope()
    scope["headers"] += [(n.encode(), v.encode()) for n, v in (headers or {}).items()]
    sent, told = [{"type": "http.request", "body": data, "more_body": False}], []

    async def receive():
        if not sent:
            await asyncio.sleep(100)
        return sent.pop()

    async def send(message):
        told.append(message)

    await app(scope, receive, send)
    text = b"".join(m.get("body", b"") for m in told if m["type"] == "http.response.body").decode()
    return told[0]["status"], json.loads(text) if text.startswith("{") else text


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_the_tokens_of_a_key_are_counted_over_all_replicas(folder):
    async def work(ask, front):
        body = {"prompt": [5] * 10, "max_tokens": 90, "ignore_eos": True}
        running = asyncio.ensure_future(ask("a", body=body))
        await until(lambda: front.unfinished)
        while (small := await ask("a", body={"prompt": [5] * 10, "max_tokens": 10}))[0] == 200:
            pass
        assert small[0] == 429
        assert "100 tokens are in flight with this API key" in small[1]["error"]["message"]
        assert (await ask("b", body={"prompt": [5], "max_tokens": 10}))[0] == 200
        assert (await running)[0] == 200
        status, refused = await ask("a", body={"prompt": [5], "max_tokens": 111})
        assert (status, refused["error"]["param"]) == (400, "max_tokens")
        assert (await ask("a", body=body))[0] == 200, "nothing is held any more"
        await until(lambda: not front.unfinished)

    with_keys(folder, work, limit=110, step_seconds=0.01)


def test_a_response_in_the_background_holds_its_tokens_until_it_ends(folder):
    async def work(ask, front):
        body = {"input": "x", "max_output_tokens": 200, "background": True}
        status, made = await ask("a", "/v1/responses", body)
        assert (status, made["status"]) == (200, "queued")
        assert (await ask("a", "/v1/responses", body))[0] == 429
        assert front.unfinished == 1
        status, _ = await ask("a", f"/v1/responses/{made['id']}/cancel")
        assert status == 200
        await until(lambda: not front.unfinished)
        assert (await ask("a", "/v1/responses", {**body, "background": False, "max_output_tokens": 3}))[
            0
        ] == 200

    with_keys(folder, work, limit=256, step_seconds=0.01)


def test_spans_of_a_replica_lie_below_that_of_the_address(folder):
    names = (None, "replica-0", "replica-1")
    exporters = [InMemorySpanExporter() for _ in names]
    tracers = [Tracer("", *pair) for pair in zip(names, exporters, strict=True)]

    async def main():
        services = [replica(folder) for _ in tracers[1:]]
        fronts = [FrontConfig(tracer=tracer) for tracer in tracers]
        handles = [Handle(make_app(*pair)) for pair in zip(services, fronts[1:], strict=True)]
        app = Front(Replicas(handles, "first", 1 << 20).app(), fronts[0], error_response)
        headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        for _ in services:  # prompts that nobody knows take turns
            body = {"prompt": [5], "max_tokens": 2}
            assert (await answer(app, "/v1/completions", body, headers=headers))[0] == 200
        for service in services:
            await service.close()

    asyncio.run(asyncio.wait_for(main(), 30))
    for tracer in tracers:
        tracer.close()
    spans = [span for exporter in exporters for span in exporter.get_finished_spans()]
    requests = [span for span in spans if span.name == "POST /v1/completions"]
    inner = [span for span in requests if span.resource.attributes["service.instance.id"] in names]
    outer = {span.context.span_id: span for span in requests if span not in inner}
    assert len(outer) == len(inner) == 2
    assert {span.resource.attributes["service.instance.id"] for span in inner} == {"replica-0", "replica-1"}
    for span in inner:
        above = outer[span.parent.span_id]
        assert above.context.trace_id == span.context.trace_id == int("ab" * 16, 16)
        assert above.attributes["castiron.request_id"] == span.attributes["castiron.request_id"]
        assert (above.parent.span_id, span.attributes["gen_ai.usage.output_tokens"]) == (int("cd" * 8, 16), 2)
    below = {span.context.span_id for span in inner}
    assert all(s.parent.span_id in below for s in spans if s.name in ("queue", "prefill", "decode"))


def test_a_response_is_there_for_its_key_alone(folder):
    async def work(ask, _front):
        _, made = await ask("a", "/v1/responses", {"input": "x", "max_output_tokens": 2})
        for key, status in (("a", 200), ("b", 404)):
            assert (await ask(key, f"/v1/responses/{made['id']}", method="GET"))[0] == status
            more = {"input": "y", "max_output_tokens": 2, "previous_response_id": made["id"]}
            assert (await ask(key, "/v1/responses", more))[0] == (200 if status == 200 else 404)

    with_keys(folder, work)


def test_refusals_have_the_form_of_their_api():
    async def work(front, handles):
        front.draining = True
        _, openai = await answer(front, "/v1/chat/completions")
        _, anthropic = await answer(front, "/v1/messages")
        assert openai["error"]["type"] == "ServiceUnavailableError"
        assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "overloaded_error")

    with_front(work)


@pytest.mark.parametrize(
    ("path", "begins", "ends"),
    [
        ("/v1/completions", 'data: {"error":', "data: [DONE]"),
        ("/v1/messages", "event: error\ndata: ", "}}"),
        ("/v1/responses", 'event: error\ndata: {"type":"error","code":"server_error",', "}"),
    ],
)
def test_a_stream_whose_replica_dies_ends_in_the_form_of_its_api(path, begins, ends):
    async def work(front, handles):
        async def kill():
            await until(lambda: max(handle.told for handle in handles) >= 2)
            for handle in handles:
                handle.dead = True

        killing = asyncio.ensure_future(kill())
        _, text = await answer(front, path, {"parts": 1000})
        await killing
        parts = text.strip().split("\n\n")
        error = parts[-2] if path == "/v1/completions" else parts[-1]
        assert error.startswith(begins)
        assert parts[-1].endswith(ends)

    with_front(work)


def swapping(handles, fails=()):
    """Has replicas take an engine, but those of ``fails`` refuse; returns what they were told."""
    told = []

    def app_of(index):
        async def app(scope, receive, send):
            folder = (await Request(scope, receive).json())["engine"]
            told.append((index, folder))
            if index in fails:
                await JSONResponse({"error": "no"}, 400)(scope, receive, send)
                return
            handles[index].folder = folder
            await JSONResponse({"engine": folder})(scope, receive, send)

        return app

    for index, handle in enumerate(handles):
        handle.app = app_of(index)
    return told


def test_an_exchange_of_the_engine_is_one_of_all():
    async def work(front, handles):
        told = swapping(handles)
        assert await answer(front, "/v1/engine/swap", {"engine": "new"}) == (200, {"engine": "new"})
        assert told == [(0, "new"), (1, "new")]
        # One that was started again has the first engine: it is not up until it has this one.
        handles[1].folder = None
        await until(lambda: told[2:] == [(1, "new")])
        await until(lambda: front._up == {0, 1})

    with_front(work)


def test_where_one_replica_refuses_an_engine_the_others_go_back():
    async def work(front, handles):
        told = swapping(handles, fails={1})
        assert (await answer(front, "/v1/engine/swap", {"engine": "new"}))[0] == 400
        assert told == [(0, "new"), (1, "new"), (0, "first")]
        await front._check(0)
        assert front._up == {0, 1}, "it has what all have"

    with_front(work)
