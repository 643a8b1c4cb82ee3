"""Large request bodies: read as small ones are, and beside the event loop."""

from __future__ import annotations

import json
import random
import threading

import httpx
import live_server
import pytest
from castiron.runtime.server import body as bodies
from castiron.runtime.server.large_json import MAX_VALUES, parse_json
from castiron.runtime.server.service import SMALL_BODY_BYTES
from fake_core import FakeCore
from server_calls import USER, post

BLANKS = ["", "", " ", "\n\t", "\r\n"]
SCALARS = ["0", "-1", "17", "12345678901234567890", "1.5", "-2e3", "true", "false", "null", '""', '"a"']
SCALARS += ['"é🙂"', r'"\" \\ \n \u00e9 \ud83d\ude42"', '"[1, 2"', '"{"']


def document(rng: random.Random, depth: int = 0) -> str:
    """A random JSON text with blanks in odd places."""
    kind = rng.random()
    if depth > 4 or kind < 0.4:
        return rng.choice(SCALARS)
    if kind < 0.55:
        items = [str(rng.randrange(-9, 200)) for _ in range(rng.randrange(9))]
    else:
        items = [document(rng, depth + 1) for _ in range(rng.randrange(5))]
    opening, closing = "[]"
    if kind > 0.8:
        opening, closing = "{}"
        items = [f"{rng.choice(SCALARS[9:])}{rng.choice(BLANKS)}:{rng.choice(BLANKS)}{i}" for i in items]
    comma = f"{rng.choice(BLANKS)},{rng.choice(BLANKS)}"
    return f"{opening}{rng.choice(BLANKS)}{comma.join(items)}{rng.choice(BLANKS)}{closing}"


def test_a_text_means_what_the_standard_librarys_parser_says():
    rng = random.Random(1)
    for _ in range(2000):
        text = document(rng)
        assert parse_json(text.encode()) == json.loads(text), text


def test_a_text_with_a_fault_is_refused_where_the_standard_library_refuses_it():
    rng = random.Random(2)
    refused = 0
    for _ in range(2000):
        text = list(document(rng))
        at = rng.randrange(len(text))
        text[at : at + rng.randrange(2)] = rng.choice(['"', ",", "]", "}", "[", "{", ":", "0", "-", "x", ""])
        fault = "".join(text)
        try:
            expected = json.loads(fault)
            json.dumps(expected, ensure_ascii=False).encode()  # which halves of surrogate pairs fail
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match="character"):
                parse_json(fault.encode())
        else:
            assert parse_json(fault.encode()) == expected
    assert refused > 500


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'"\xff"', "invalid UTF-8 at byte 1"),
        (b'"\\ud800"', "surrogate"),
        (b"[" * 300 + b"]" * 300, "nested deeper than 200"),
        (b"[" + b'"",' * MAX_VALUES + b'""]', f"more than {MAX_VALUES} values"),
        (b"9" * 5000, "digits"),
    ],
)
def test_what_cannot_be_served_is_refused(raw, says):
    with pytest.raises(ValueError, match=says):
        parse_json(raw)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [1, 2, "x"]}),
        ("/v1/completions", {"prompt": "x", "temperature": True}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"5": "a"}}),
        ("/v1/chat/completions", {"messages": [5]}),
        ("/v1/chat/completions", {"messages": USER, "n": 1.0}),
        ("/v1/chat/completions", {"messages": USER, "stream_options": 5}),
        ("/v1/chat/completions", {"messages": {}}),
        ("/v1/responses", {"input": [{"role": "user"}]}),
        ("/v1/messages", {"messages": USER, "max_tokens": 0}),
        ("/tokenize", {"prompt": 5}),
    ],
)
def test_a_fault_in_a_large_body_is_told_as_in_a_small_one(server, path, fields):
    small, large = post(server, path, **fields), post(server, path, **fields, padding="x" * SMALL_BODY_BYTES)
    assert small.status_code == 400
    assert (large.status_code, large.json()) == (400, small.json())


def test_a_large_body_is_answered_as_a_small_one(server):
    for path, fields in (
        ("/v1/completions", {"prompt": [5, 6], "max_tokens": 3, "temperature": 0}),
        ("/tokenize", {"prompt": "Hello"}),
        ("/v1/messages/count_tokens", {"messages": USER}),
    ):
        small, large = (post(server, path, **fields, padding="x" * n) for n in (0, SMALL_BODY_BYTES))
        assert (small.status_code, large.status_code) == (200, 200), large.text
        of_each = dict.fromkeys(small.json().keys() & {"id", "created", "usage"})
        assert {**small.json(), **of_each} == {**large.json(), **of_each}


def test_a_stream_goes_on_while_a_large_body_is_read(folder, monkeypatch):
    """Were it read by the event loop, or by C code on a thread, no event would come between."""
    events = 0
    between = []
    threads = []

    def watched(raw):
        begun = events
        value = parse_json(raw)
        between.append(events - begun)
        threads.append(threading.current_thread().name)
        return value

    monkeypatch.setattr(bodies, "parse_json", watched)
    raw = b'{"prompt": [' + b"1," * (5 << 20) + b"1]}"
    core = FakeCore(step_seconds=0.001)
    with live_server.serve(core, tokenizer_dir=folder, max_seq_len=1 << 20) as server:
        over = threading.Event()

        def read() -> None:
            nonlocal events
            body = {"prompt": [5], "max_tokens": 1 << 19, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{server[0]}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    events += line.startswith("data: ")
                    if over.is_set():
                        break

        reader = threading.Thread(target=read)
        reader.start()
        try:
            answer = httpx.post(f"{server[0]}/v1/completions", content=raw, timeout=60)
        finally:
            over.set()
            reader.join(30)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert threads[0].startswith("castiron-text")
    assert between[0] >= 5, "events of the stream while the body was read"
