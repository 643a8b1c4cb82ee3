"""Clients that go, queues that are full, engines that die, and shutdown."""

from __future__ import annotations

import asyncio
import json
import threading

import fake_core
import httpx
import live_server
import pytest
from castiron.runtime.async_engine import AsyncEngine
from castiron.runtime.server.app import make_app
from castiron.runtime.server.service import ServerConfig, Service
from fake_core import FOR_EVER, FakeCore
from server_calls import USER, connect, post, raw_post, wait_until


def test_metrics_count_what_was_served(folder):
    with live_server.serve(tokenizer_dir=folder) as server:
        post(server, "/v1/completions", prompt=[5, 6, 7], max_tokens=4, n=2)
        post(server, "/v1/completions", prompt=[5], max_tokens=-4)
        text = httpx.get(server[0] + "/metrics").text
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    label = '{model_name="fake"}'
    assert values[f"castiron:generation_tokens_total{label}"] == 8
    assert values[f"castiron:prompt_tokens_total{label}"] == 6
    assert values['castiron:request_success_total{finished_reason="length",model_name="fake"}'] == 2
    assert values['castiron:request_refused_total{model_name="fake",status="400"}'] == 1
    assert values[f"castiron:time_to_first_token_seconds_count{label}"] == 2
    assert values[f"castiron:num_requests_running{label}"] == 0
    assert values[f"castiron:kv_blocks_total{label}"] == 100


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5], "max_tokens": 250, "n": 2}),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 200, "n": 2}),
        ("/v1/messages", {"messages": USER, "max_tokens": 200}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 200}),
    ],
)
def test_a_client_that_goes_frees_its_requests(folder, path, body, stream):
    core = FakeCore()
    count = body.get("n", 1)
    with live_server.serve(core, tokenizer_dir=folder) as (url, service):
        with core.held():
            with connect(url) as client:
                client.sendall(raw_post(path, {**body, "stream": stream}))
                wait_until(lambda: service.engine.session.unfinished == count)
            wait_until(lambda: len(core.cancelled) >= count)
        wait_until(lambda: service.engine.session.unfinished == 0)
        assert service.slot.current.users == 0
        text = httpx.get(url + "/metrics").text
        reason = 'finished_reason="cancelled",model_name="fake"'
        assert f"request_success_total{{{reason}}} {float(count)}" in text


def test_a_full_queue_is_429_with_retry_after_and_nothing_is_left_behind(folder):
    core = FakeCore(max_batch_size=2)
    with live_server.serve(core, tokenizer_dir=folder, max_queue_size=1) as server:
        answers = []
        body = {"prompt": [5], "max_tokens": 60}
        threads = [
            threading.Thread(target=lambda: answers.append(post(server, "/v1/completions", **body)))
            for _ in range(3)
        ]
        with core.held():
            for t in threads:
                t.start()
            wait_until(lambda: server[1].engine.session.unfinished == 3)
            full = post(server, "/v1/completions", prompt=[5], max_tokens=1)
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["type"] == "RateLimitError"
        for t in threads:
            t.join()
        assert [a.status_code for a in answers] == [200] * 3
        # n counts n, and a request that does not fit as a whole leaves none of its outputs running
        thread = threading.Thread(target=lambda: answers.append(post(server, "/v1/completions", **body)))
        with core.held():
            thread.start()
            wait_until(lambda: server[1].engine.session.unfinished == 1)
            assert post(server, "/v1/completions", prompt=[5], max_tokens=60, n=3).status_code == 429
        thread.join()
        wait_until(lambda: server[1].engine.session.unfinished == 0)
        assert post(server, "/v1/completions", prompt=[5], max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [[5]] * 4}, "prompt"),
        ({"prompt": ["a", "b"], "n": 2}, "prompt"),
        ({"prompt": [5], "n": 4}, "n"),
        ({"prompt": ["a"] * 200_000}, "prompt"),
    ],
)
def test_a_request_that_no_queue_could_ever_hold_is_400_at_once(folder, body, param):
    with live_server.serve(FakeCore(max_batch_size=2), tokenizer_dir=folder, max_queue_size=1) as server:
        answer = post(server, "/v1/completions", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert post(server, "/v1/completions", prompt=[[5]] * 3, max_tokens=1).status_code == 200
        assert post(server, "/v1/chat/completions", messages=USER, n=4).status_code == 400


def test_stopping_finishes_what_was_accepted(folder):
    core = FakeCore(step_seconds=0.01)
    answers = []
    with live_server.serve(core, tokenizer_dir=folder) as server:
        thread = threading.Thread(
            target=lambda: answers.append(post(server, "/v1/completions", prompt=[5], max_tokens=60))
        )
        with core.held():
            thread.start()
            wait_until(lambda: server[1].engine.session.unfinished == 1)
    thread.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_shutdown_does_not_wait_for_gets_503_or_an_error_event(folder, stream):
    body = json.dumps({"prompt": [5], "max_tokens": FOR_EVER, "stream": stream}).encode()
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [],
    }
    sent = []

    async def cut():
        core = FakeCore(step_seconds=0.01)
        session = fake_core.make_session(core, tokenizer_dir=folder, max_seq_len=2 * FOR_EVER)
        service = Service(AsyncEngine(session), ServerConfig(("fake",)))
        inbox = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": body})

        async def send(message):
            sent.append(message)

        task = asyncio.create_task(make_app(service)(scope, inbox.get, send))
        while not session.unfinished or (stream and len(sent) < 3):
            await asyncio.sleep(0.01)
        task.cancel()  # what uvicorn does after --shutdown-timeout, and asyncio after a second signal
        await task
        while session.unfinished:
            await asyncio.sleep(0.01)
        await service.close()

    asyncio.run(cut())
    assert sent[0]["status"] == (200 if stream else 503)
    raw = b"".join(m["body"] for m in sent[1:]).decode()
    assert not sent[-1].get("more_body")
    if stream:
        assert raw.endswith("\n\ndata: [DONE]\n\n")
        raw = raw.split("\n\n")[-3].removeprefix("data: ")
    assert json.loads(raw)["error"]["type"] == "ServiceUnavailableError"


def test_while_draining_ready_is_503_and_new_requests_are_refused(folder):
    core = FakeCore()
    with live_server.serve(core, tokenizer_dir=folder) as server:
        answers = []
        body = {"prompt": [5], "max_tokens": 250}
        running = threading.Thread(target=lambda: answers.append(post(server, "/v1/completions", **body)))
        with core.held():
            running.start()
            wait_until(lambda: server[1].engine.session.unfinished == 1)
            server[1].draining = True
            assert httpx.get(server[0] + "/health/ready").status_code == 503
            assert httpx.get(server[0] + "/health/live").status_code == 200
            assert post(server, "/v1/completions", prompt=[5]).status_code == 503
            server[1].draining = False
        running.join()
        assert answers[0].status_code == 200


def test_a_dead_engine_is_503_everywhere_and_an_error_event_in_streams(folder):
    core = FakeCore(step_seconds=0.01)
    body = {"prompt": [5], "max_tokens": FOR_EVER, "stream": True}
    with live_server.serve(core, tokenizer_dir=folder, max_seq_len=2 * FOR_EVER) as server:
        with httpx.stream("POST", server[0] + "/v1/completions", json=body, timeout=20) as answer:
            parts = answer.iter_text()
            next(parts)
            core.fail_with = RuntimeError("kernel fault")
            *_, error, done, end = "".join(parts).split("\n\n")
        assert "kernel fault" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert (done, end) == ("data: [DONE]", "")
        for path in ("/health", "/health/live", "/health/ready"):
            assert httpx.get(server[0] + path).status_code == 503
        assert post(server, "/v1/completions", prompt=[5]).status_code == 503
