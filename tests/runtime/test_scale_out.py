"""Several replicas behind one address: who gets a request, what a call brings back, what a death costs.
Without Ray: test_replicas_on_ray.py has it.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from castiron.runtime.scale_out.asgi_call import HttpRequest, call
from castiron.runtime.scale_out.metrics import merge_metrics
from castiron.runtime.scale_out.prefix_router import PrefixRouter, prefix_keys
from castiron.runtime.scale_out.replicas import Replicas, _read
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse


def chat(*texts, **more):
    return {"messages": [{"role": "user", "content": text} for text in texts], **more}


def shared(a, b):
    """How many keys two prompts share; those must be the first ones."""
    same = [x == y for x, y in zip(prefix_keys(a), prefix_keys(b), strict=False)]
    assert same == sorted(same, reverse=True)
    return sum(same)


def test_prompts_share_the_keys_of_what_they_share():
    long = "word " * 200
    assert shared(chat(long, "a"), chat(long, "b")) >= 1000 // 128
    assert shared({"prompt": long}, {"prompt": long + "more"}) == 7
    assert shared({"prompt": [1] * 400}, {"prompt": [1] * 400}) == shared(
        {"prompt": [[1] * 400]}, {"prompt": [1] * 400}
    )
    assert shared(chat(long), chat("x" + long)) == 0
    for field in ("model", "cache_salt", "tools", "system"):
        assert shared(chat(long), chat(long, **{field: "other"})) == 0
    assert prefix_keys({"prompt": "short"}) == []
    assert prefix_keys({}) == []


def test_a_prompt_goes_where_its_beginning_is_and_new_ones_take_turns():
    router = PrefixRouter(3)
    everybody = [0, 1, 2]
    homes = {}
    for name in "abc":
        homes[name] = router.choose(prefix_keys({"prompt": name * 600}), everybody)
    assert sorted(homes.values()) == everybody  # nothing known: the least busy
    for home in homes.values():
        router.done(home)
    for _ in range(2):
        for name, home in homes.items():
            chosen = router.choose(prefix_keys({"prompt": name * 600 + "and so on " * 40}), everybody)
            assert chosen == home
            router.done(chosen)


def test_a_busy_replica_gets_no_more_for_the_sake_of_its_cache():
    router = PrefixRouter(2, max_imbalance=4)
    keys = prefix_keys({"prompt": "a" * 600})
    chosen = [router.choose(keys, [0, 1]) for _ in range(40)]
    home = chosen[0]
    assert chosen[:4] == [home] * 4
    assert chosen[4] != home
    assert max(router.loads) - min(router.loads) <= 4
    assert router.choose(keys, [home]) == home, "the only one that is up"


def test_what_a_restarted_replica_had_is_forgotten():
    router = PrefixRouter(2)
    keys = prefix_keys({"prompt": "a" * 600})
    home = router.choose(keys, [0, 1])
    other = router.choose(prefix_keys({"prompt": "b" * 600}), [0, 1])
    router.done(home)
    router.forget(home)
    assert other != home
    assert router.choose(prefix_keys({"prompt": "b" * 600}), [0, 1]) == other
    # Nobody has it now, so that it goes to the one with less to do.
    assert router.choose(keys, [0, 1]) == home
    router.done(home)


def test_metrics_of_replicas_are_told_apart():
    texts = {
        0: '# HELP castiron:a_total A.\n# TYPE castiron:a_total counter\ncastiron:a_total{m="x"} 3.0\n',
        1: '# HELP castiron:a_total A.\n# TYPE castiron:a_total counter\ncastiron:a_total{m="x"} 4.0\n',
    }
    (family,) = text_string_to_metric_families(merge_metrics(texts).decode())
    assert family.type == "counter"
    assert [(s.name, s.labels, s.value) for s in family.samples] == [
        ("castiron:a_total", {"m": "x", "replica": "0"}, 3.0),
        ("castiron:a_total", {"m": "x", "replica": "1"}, 4.0),
    ]


def http(method="POST", path="/v1/completions", body=b"{}", query=b""):
    return HttpRequest(method, path, query, [(b"content-type", b"application/json")], body)


def test_a_call_brings_all_messages_of_the_application():
    async def app(scope, receive, send):
        request = Request(scope, receive)
        await JSONResponse({"got": (await request.json()), "q": request.query_params["q"]})(
            scope, receive, send
        )

    async def main():
        return [m async for batch in call(app, http(body=b"[7]", query=b"q=1")) for m in batch]

    head, *rest = asyncio.run(main())
    assert head["status"] == 200
    assert json.loads(b"".join(m["body"] for m in rest)) == {"got": [7], "q": "1"}


def test_an_application_learns_that_its_caller_has_gone():
    ended = []

    async def app(scope, receive, send):
        async def forever():
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0.001)
            finally:
                ended.append(True)

        await StreamingResponse(forever())(scope, receive, send)

    async def main():
        stream = call(app, http())
        await anext(stream)
        await stream.aclose()

    asyncio.run(asyncio.wait_for(main(), 10))
    assert ended == [True]


class Handle:
    """A handle of Ray Serve as far as the front uses it, over an application here."""

    def __init__(self, app):
        self.app = app
        self.dead = False
        self.told = 0
        self.folder = None
        self.answer = self.check_health = self

    def options(self, stream):
        assert stream
        return Streaming(self)

    def remote(self):
        async def check():
            if self.dead:
                raise RuntimeError("actor died")
            return self.folder

        return Cancellable(check())


class Cancellable:
    def __init__(self, work):
        self.work = work

    def __await__(self):
        return self.work.__await__()

    def cancel(self):
        self.work.close()


class Streaming:
    def __init__(self, handle):
        self.handle = handle
        self.answer = self

    def remote(self, given):
        return Stream(self.handle, given)


class Stream:
    def __init__(self, handle, given):
        self.handle = handle
        self.inner = call(handle.app, given)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.handle.dead:
            raise RuntimeError("actor died")
        batch = await anext(self.inner)
        self.handle.told += 1
        return batch

    def cancel(self):
        self.closing = asyncio.ensure_future(self.inner.aclose())


def replica_app(name):
    async def app(scope, receive, send):
        request = Request(scope, receive)
        if scope["path"] == "/metrics":
            text = f"# HELP a A.\n# TYPE a gauge\na {name}.0\n"
            await StreamingResponse(iter([text.encode()]))(scope, receive, send)
            return
        if scope["path"] == "/v1/load_lora_adapter":
            await JSONResponse({"at": name}, 200 if name == 0 else 400)(scope, receive, send)
            return
        body = await request.json() if scope["method"] == "POST" else {}

        async def parts():
            for i in range(body.get("parts", 1)):
                yield f"data: {name} {i}\n\n".encode()
                await asyncio.sleep(0.01)

        await StreamingResponse(parts(), media_type="text/event-stream")(scope, receive, send)

    return app


async def ask(front, path="/v1/completions", body=None, method="POST", query=""):
    """Status and text of an answer."""
    data = json.dumps(body or {}).encode()
    scope = http(method, path, data, query.encode()).scope()
    sent = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive():
        if not sent:
            await asyncio.sleep(100)
        return sent.pop()

    told = []

    async def send(message):
        told.append(message)

    await front(scope, receive, send)
    text = b"".join(m.get("body", b"") for m in told if m["type"] == "http.response.body").decode()
    return told[0]["status"], text


def with_front(work, count=2):
    async def main():
        handles = [Handle(replica_app(i)) for i in range(count)]
        front = Replicas(handles, "first", 1 << 20)
        watching = asyncio.ensure_future(front._watch())
        try:
            return await work(front, handles)
        finally:
            watching.cancel()

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_conversations_stay_with_their_replica():
    async def work(front, _handles):
        for name in "abcd":
            said = name * 300
            homes = set()
            for turn in range(3):
                status, text = await ask(front, "/v1/chat/completions", chat(said, *["more"] * turn))
                assert status == 200
                homes.add(text)
            assert len(homes) == 1
        assert front.loads == [0, 0]

    with_front(work)


def test_a_replica_that_is_dead_costs_no_request_and_comes_back():
    async def work(front, handles):
        handles[0].dead = True
        for _ in range(6):
            assert await ask(front) == (200, "data: 1 0\n\n")
        handles[1].dead = True
        status, text = await ask(front)
        assert status == 503
        assert "no replica is up" in text
        status, text = await ask(front, "/health/ready", method="GET")
        assert (status, json.loads(text)["replicas_up"]) == (503, 0)
        handles[0].dead = False
        while (await ask(front, "/health/ready", method="GET"))[0] != 200:  # it looks once a second
            await asyncio.sleep(0.05)
        assert await ask(front) == (200, "data: 0 0\n\n")

    with_front(work)


def test_a_replica_that_dies_within_a_stream_ends_it_with_an_error_event():
    async def work(front, handles):
        async def kill():
            while max(handle.told for handle in handles) < 3:
                await asyncio.sleep(0.005)
            for handle in handles:
                handle.dead = True

        killing = asyncio.ensure_future(kill())
        status, text = await ask(front, body={"parts": 1000})
        await killing
        assert status == 200
        *events, error, done, end = text.split("\n\n")
        assert len(events) >= 1
        assert "the replica failed while it answered" in json.loads(error[6:])["error"]["message"]
        assert (done, end) == ("data: [DONE]", "")
        assert front.loads == [0, 0]

    with_front(work)


def test_draining_finishes_what_runs_and_refuses_what_comes():
    async def work(front, _handles):
        running = asyncio.ensure_future(ask(front, body={"parts": 20}))
        while front.unfinished == 0:
            await asyncio.sleep(0)
        front.draining = True
        assert front.unfinished == 1
        assert (await ask(front))[0] == 503
        assert (await ask(front, "/health/ready", method="GET"))[0] == 503
        assert (await ask(front, "/health/live", method="GET"))[0] == 200
        assert (await running)[1].count("data:") == 20
        assert front.unfinished == 0

    with_front(work)


def test_what_concerns_all_replicas_asks_all():
    async def work(front, _handles):
        assert await ask(front, "/v1/load_lora_adapter") == (400, '{"at":1}')
        status, text = await ask(front, "/metrics", method="GET")
        assert status == 200
        assert 'a{replica="0"} 0.0' in text
        assert 'a{replica="1"} 1.0' in text
        for i in (0, 1):
            assert (await ask(front, "/stats", method="GET", query=f"replica={i}"))[1] == f"data: {i} 0\n\n"
        assert (await ask(front, "/stats", method="GET", query="replica=2"))[0] == 400

    with_front(work)


def test_a_body_that_is_too_large_is_refused_before_a_replica_sees_it():
    async def work(front, _handles):
        assert (await ask(front, body={"x": "y" * (1 << 20)}))[0] == 413

    with_front(work)


def test_a_client_that_goes_frees_its_replica():
    async def work(front, handles):
        ended = asyncio.Event()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await receive())["type"] != "http.disconnect":
                pass
            ended.set()

        for handle in handles:
            handle.app = app
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}]
        gone = asyncio.Event()

        async def receive():
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(_message):
            gone.set()

        await front(http().scope(), receive, send)
        await asyncio.wait_for(ended.wait(), 5)
        assert front.loads == [0, 0]

    with_front(work)


def test_a_response_is_found_where_it_was_made_and_goes_on_there():
    async def work(front, handles):
        def app_of(name):
            async def app(scope, receive, send):
                if scope["method"] == "GET":
                    status = 200 if scope["path"] == f"/v1/responses/resp_{name}" else 404
                    await JSONResponse({"at": name}, status)(scope, receive, send)
                else:
                    await JSONResponse({"at": name})(scope, receive, send)

            return app

        for name, handle in enumerate(handles):
            handle.app = app_of(name)
        for name in (0, 1, 0, 1, 1):
            found = await ask(front, f"/v1/responses/resp_{name}", method="GET")
            assert found == (200, f'{{"at":{name}}}')
            body = {"input": "and now?", "previous_response_id": f"resp_{name}"}
            assert await ask(front, "/v1/responses", body) == (200, f'{{"at":{name}}}')
        assert (await ask(front, "/v1/responses/resp_9", method="GET"))[0] == 404
        assert (await ask(front, "/v1/responses", {"input": "x", "previous_response_id": "../x"}))[0] == 200

    with_front(work)


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"\xff"])
def test_what_is_no_object_goes_to_a_replica_that_says_so(body):
    assert _read(body) == ([], None)
