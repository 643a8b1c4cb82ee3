"""What the tests of the server send, and what they wait for."""

from __future__ import annotations

import json
import socket
import time

import httpx
from castiron.runtime.tokenizer import Tokenizer


def post(server, path, **body):
    return httpx.post(server[0] + path, json=body, timeout=20)


def events(server, path, **body):
    """The parsed events of a stream; checks the framing."""
    with httpx.stream("POST", server[0] + path, json={**body, "stream": True}, timeout=20) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = "".join(answer.iter_text())
    parts = raw.split("\n\n")
    assert parts[-1] == ""
    assert parts[-2] == "data: [DONE]"
    assert all(p.startswith("data: ") for p in parts[:-1])
    return [json.loads(p[6:]) for p in parts[:-2]]


def connect(url):
    """A connection of our own, for what no HTTP client would do."""
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10)


def raw_post(path, body, *headers):
    """The bytes of a request; ``body``: bytes, or what is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data


def says(folder, text):
    return Tokenizer(folder).encode(text, add_special_tokens=False)


USER = [{"role": "user", "content": "Hello"}]


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)
