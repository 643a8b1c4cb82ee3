"""POST /v1/engine/swap: another engine takes over, and no request notices."""

from __future__ import annotations

import threading

import fake_core
import httpx
import live_server
import pytest
from fake_core import FakeCore
from server_calls import events, post, wait_until

from castiron.errors import EngineError


class Loader:
    """Opens "engines": cores that say one token all the time."""

    def __init__(self, folder):
        self.folder = folder
        self.sessions = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, path):
        self.gate.wait(10)
        if not path.isdigit():
            raise EngineError(f"{path} is no engine")
        core = FakeCore(script=[int(path)], step_seconds=0.01)
        if path == "0":
            core.fail_with = RuntimeError("no such device")
        tokenizer = None if path == "99" else self.folder
        self.sessions.append(fake_core.make_session(core, name=f"engine-{path}", tokenizer_dir=tokenizer))
        return self.sessions[-1]


@pytest.fixture
def swapping(folder):
    first = FakeCore(script=[40], step_seconds=0.01)
    with live_server.serve(first, tokenizer_dir=folder, load_engine=Loader(folder)) as server:
        yield server


def tokens(server, **body):
    answer = post(server, "/v1/completions", **{"prompt": [5], "return_token_ids": True, **body})
    return answer.json()["choices"][0]["token_ids"]


def test_requests_that_run_finish_on_the_old_engine_which_is_freed_then(swapping):
    old = swapping[1].engine.session
    long = []
    threads = [
        threading.Thread(target=lambda: long.append(tokens(swapping, max_tokens=100))),
        threading.Thread(
            target=lambda: long.append(
                [
                    token
                    for chunk in events(
                        swapping, "/v1/completions", prompt=[5], max_tokens=100, return_token_ids=True
                    )
                    for token in chunk["choices"][0]["token_ids"]
                ]
            )
        ),
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: old.unfinished == 2)
    answer = post(swapping, "/v1/engine/swap", engine="41")
    assert answer.status_code == 200
    assert (answer.json()["before"], answer.json()["engine"]) == ("fake", "engine-41")
    assert old.unfinished == 2
    assert tokens(swapping, max_tokens=3) == [41] * 3
    assert httpx.get(swapping[0] + "/v1/models").json()["data"][0]["root"] == "engine-41"
    for thread in threads:
        thread.join()
    assert long == [[40] * 100] * 2
    wait_until(lambda: old.core.closed)
    assert 'num_requests_running{model_name="fake"} 0' in httpx.get(swapping[0] + "/metrics").text


def test_a_client_that_goes_ends_its_request_on_the_old_engine(swapping):
    old = swapping[1].engine.session
    body = {"prompt": [5], "max_tokens": 250, "stream": True}
    with httpx.stream("POST", swapping[0] + "/v1/completions", json=body) as stream:
        parts = stream.iter_raw()  # kept: httpx closes the connection with it
        next(parts)
        assert post(swapping, "/v1/engine/swap", engine="41").status_code == 200
        assert not old.core.closed
    wait_until(lambda: old.core.closed)
    assert old.core.cancelled


@pytest.mark.parametrize("path", ["nowhere", "0", "99"])
def test_an_engine_that_cannot_be_loaded_or_does_not_work_changes_nothing(swapping, path):
    answer = post(swapping, "/v1/engine/swap", engine=path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "engine")
    assert tokens(swapping, max_tokens=2) == [40] * 2
    loader = swapping[1].load_engine
    assert all(session.core.closed for session in loader.sessions)


def test_one_exchange_at_a_time(swapping):
    swapping[1].load_engine.gate.clear()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(post(swapping, "/v1/engine/swap", engine="41")))
    thread.start()
    wait_until(lambda: swapping[1].slot.loading)
    assert post(swapping, "/v1/engine/swap", engine="42").status_code == 409
    assert tokens(swapping, max_tokens=1) == [40]
    swapping[1].load_engine.gate.set()
    thread.join()
    assert answers[0].status_code == 200


def test_without_the_option_it_is_403(server):
    assert post(server, "/v1/engine/swap", engine="41").status_code == 403


def test_stopping_closes_every_engine(folder):
    loader = Loader(folder)
    first = FakeCore(script=[40])
    with live_server.serve(first, tokenizer_dir=folder, load_engine=loader) as server:
        assert post(server, "/v1/engine/swap", engine="41").status_code == 200
    assert first.closed
    assert loader.sessions[0].core.closed
