"""Tokens that go to the socket without waking a task: the stream is the same as with it."""

from __future__ import annotations

import json
import socket
import time

import live_server
import pytest
from castiron.runtime.server import http_protocol
from castiron.runtime.server.streaming import MARK, event, text_event
from fake_core import FakeCore
from server_calls import USER, events, post, raw_post, says, wait_until


@pytest.fixture
def counted(monkeypatch):
    """How many parts went the short way."""
    taken = []
    real = http_protocol._write_now

    def counting(cycle, data):
        done = real(cycle, data)
        taken.append(done)
        return done

    monkeypatch.setattr(http_protocol, "_write_now", counting)
    return taken


def joined(chunks, index=0):
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": [5, 6]}), ("/v1/chat/completions", {"messages": USER})],
)
def test_a_plain_stream_goes_the_short_way_and_says_the_same(folder, counted, path, body):
    script = says(folder, 'The "quick"\n brown\\ fox é日本🙃 jumps over it \u2028 and so on')
    core = FakeCore(script=script, step_seconds=0.002)
    with live_server.serve(core, tokenizer_dir=folder) as server:
        body = {**body, "max_tokens": len(script), "n": 2, "ignore_eos": True}
        chunks = events(server, path, **body, stream_options={"include_usage": True})
        whole = post(server, path, **body).json()
    assert sum(counted) > len(chunks) / 2  # a busy server puts tokens together, and has fewer chunks
    for choice in whole["choices"]:
        expected = choice["text"] if "text" in choice else choice["message"]["content"]
        assert joined(chunks, choice["index"]) == expected
        assert "日本🙃" in expected
    assert chunks[-1]["usage"] == whole["usage"]
    # every chunk has the same fields, whichever way it went
    assert len({tuple(c) for c in chunks[:-1]}) == 1
    assert len({tuple(c["choices"][0]) for c in chunks[2:-1]}) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 1},
        {"return_token_ids": True},
        {"stream_options": {"continuous_usage_stats": True}},
    ],
)
def test_streams_with_more_than_text_in_their_chunks_do_not(folder, counted, fields):
    with live_server.serve(FakeCore(step_seconds=0.002), tokenizer_dir=folder) as server:
        events(server, "/v1/completions", prompt=[5], max_tokens=8, **fields)
    assert not counted


def test_a_client_that_reads_slowly_gets_all_in_order(folder, counted):
    script = says(folder, "abcdefghij" * 30)
    core = FakeCore(script=script)
    count = 2000
    body = {"prompt": [5], "max_tokens": count, "stream": True, "ignore_eos": True, "n": 8, "user": "x"}
    with (
        live_server.serve(core, tokenizer_dir=folder, max_seq_len=4096) as (url, service),
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(raw_post("/v1/completions", body, "Connection: close"))
        wait_until(lambda: len(core.submitted) == 8 and service.engine.session.unfinished == 0, 60)
        time.sleep(0.1)
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
    body = b"".join(line for line in answer.partition(b"\r\n\r\n")[2].split(b"\r\n") if b"{" in line)
    chunks = [json.loads(part) for part in body.decode().split("data: ") if part.startswith("{")]
    expected = live_text(folder, script, count)
    assert all(joined(chunks, k) == expected for k in range(8))
    assert not all(counted)  # else the client was not slow


def live_text(folder, script, count):
    from castiron.runtime.tokenizer import Tokenizer

    return Tokenizer(folder).decode([script[k % len(script)] for k in range(count)])


def test_the_text_alone_differs_between_events_of_one_maker():
    data = {"id": "a", "choices": [{"delta": {"content": MARK}, "finish_reason": None}]}
    made = text_event(data, MARK)
    for text in ("x", "", 'a"b\\c\n\t\x00\x1f', "é\u2028🙃", "</script>"):
        data["choices"][0]["delta"]["content"] = text
        assert made(text) == event(data)
        assert json.loads(made(text)[6:]) == data


def test_tokens_without_text_send_nothing_and_are_counted(folder, counted):
    flag = says(folder, "🙃")  # several tokens, one character
    assert len(flag) > 1
    core = FakeCore(script=flag, step_seconds=0.002)
    with live_server.serve(core, tokenizer_dir=folder) as server:
        count = len(flag) * 10
        chunks = events(
            server,
            "/v1/completions",
            prompt=[5],
            max_tokens=count,
            ignore_eos=True,
            stream_options={"include_usage": True},
        )
    assert joined(chunks) == "🙃" * 10
    assert chunks[-1]["usage"]["completion_tokens"] == count
