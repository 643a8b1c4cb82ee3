"""Thousands of hostile requests against a server: ``python tests/runtime/hostile_requests.py ENGINE``.

The server must answer each with a status that is no 5xx (501 is one of ours), or close the connection; serve
a request of our own between them with the same answer as before; log no trace; and end with the memory, the
files and the KV blocks that it had after the first part of them.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from server_calls import raw_post
from server_process import ServerProcess, report, running

_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/engine/swap"),
    *("/v1/models", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize", "/health", "/nothing"),
)
_FIELDS = (
    *("prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
    *("min_p", "typical_p", "n", "best_of", "stop", "stop_token_ids", "logprobs", "top_logprobs", "seed"),
    *("logit_bias", "bad_words", "allowed_token_ids", "response_format", "structured_outputs", "tools"),
    *("tool_choice", "stream", "stream_options", "echo", "suffix", "priority", "cache_salt", "documents"),
    *("chat_template_kwargs", "prompt_logprobs", "truncate_prompt_tokens", "repetition_penalty", "user"),
    *("min_tokens", "length_penalty", "use_beam_search", "early_stopping", "top_p_reset_ids", "input"),
    *("no_repeat_ngram_size", "frequency_penalty", "ignore_eos", "lora_name", "engine", "tokens"),
)
#: As JSON text, since some of them are no JSON.
_VALUES = (
    *("null", "true", "false", "0", "-1", "1e400", "-1e400", "NaN", "Infinity", "9" * 400, "1e-320", "0.5"),
    *("2147483648", "-9223372036854775809", '""', '"x"', '"\\ud800"', '"\\u0000"', '"' + "a" * 50_000 + '"'),
    *("[]", "{}", "[null]", "[[]]", "[[[[1]]]]", '["", ""]', '[1, "a"]', "[-1]", "[1e9]", '{"a": NaN}'),
    *(
        '{"": {}}',
        "[" * 400 + "]" * 400,
        "[" * 100_000,
        '{"a":' * 300 + "1" + "}" * 300,
        "[0" + ",0" * 9999 + "]",
    ),
    *('[{"role": "user"}]', '[{"role": 1, "content": []}]', '[{"content": {"a": 1}}]', '"{{ 1/0 }}"'),
    *('{"100000000": 1}', '{"-1": 1}', '{"1": 1e39}', '{"1": "x"}', '"\\u202e\\ufeff"'),
)
_FORMS = (
    *(
        '{"regex": "("}',
        '{"regex": "(a*)*b{1000000}"}',
        '{"regex": "\\\\p{Nope}"}',
        '{"regex": "a{99999}{99999}"}',
    ),
    *(
        '{"json": "{"}',
        '{"json": {"type": "nope"}}',
        '{"json": {"$ref": "#"}}',
        '{"json": {"$ref": "http://x"}}',
    ),
    *('{"json": {"minLength": 1000000000, "type": "string"}}', '{"json": {"enum": []}}', '{"choice": []}'),
    *(
        '{"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}',
        '{"choice": [""]}',
        '{"grammar": "x"}',
    ),
    *(
        '{"grammar": "start: start"}',
        '{"grammar": "start: /(/"}',
        '{"json": {"pattern": "(((", "type": "string"}}',
    ),
    *('{"regex": "a", "choice": ["b"]}', '{"json": ' + '{"items":' * 200 + "{}" + "}" * 200 + "}"),
)


class Attack:
    """One way of being hostile after the other, chosen by a seed."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self._server = server
        self._seed = seed
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []
        self._lock = threading.Lock()
        ways: list[tuple[int, Callable[[random.Random], str]]] = [
            (60, self._bad_field),
            (10, self._bad_form),
            (8, self._garbage_body),
            (6, self._garbage_http),
            (6, self._partial),
            (4, self._wrong_framing),
            (3, self._gone),
            (2, self._half_closed),
            (1, self._slow),
        ]
        self._ways = [way for weight, way in ways for _ in range(weight)]

    def one(self, number: int) -> None:
        """Send request ``number``; what it does follows from the seed and the number alone."""
        rng = random.Random(f"{self._seed}:{number}")
        way = rng.choice(self._ways)
        try:
            status = way(rng)
        except OSError as e:
            status = f"closed ({type(e).__name__})"
            if isinstance(e, ConnectionRefusedError | TimeoutError):
                self._fail(f"request {number} ({way.__name__}): {e!r}")
        with self._lock:
            self.statuses[status] += 1
        if status[:1] == "5" and status != "501":
            self._fail(f"request {number} ({way.__name__}): status {status}")

    def _fail(self, what: str) -> None:
        with self._lock:
            self.failures.append(what)

    def _body(self, rng: random.Random, **fields: str) -> bytes:
        chat = rng.random() < 0.5
        body = {
            **({"messages": '[{"role": "user", "content": "hi"}]'} if chat else {"prompt": '"hi"'}),
            "max_tokens": "3",
            **({"stream": "true"} if rng.random() < 0.3 else {}),
            **fields,
        }
        return ("{" + ", ".join(f'"{name}": {value}' for name, value in body.items()) + "}").encode()

    def _bad_field(self, rng: random.Random) -> str:
        fields = {rng.choice(_FIELDS): rng.choice(_VALUES) for _ in range(rng.choice((1, 1, 1, 2, 3)))}
        return self._post(rng.choice(_PATHS[:2] * 3 + _PATHS), self._body(rng, **fields))

    def _bad_form(self, rng: random.Random) -> str:
        form = rng.choice(_FORMS)
        field = {"structured_outputs": form}
        if form.startswith('{"json": {'):
            wrapped = f'{{"type": "json_schema", "json_schema": {{"schema": {form[9:-1]}}}}}'
            field = rng.choice((field, {"response_format": wrapped}))
        return self._post(rng.choice(_PATHS[:2]), self._body(rng, **field))

    def _garbage_body(self, rng: random.Random) -> str:
        good = self._body(rng)
        cut = good[: rng.randrange(len(good))]
        noise = rng.randbytes(rng.choice((1, 10, 1000)))
        bad = rng.choice((noise, cut, good + noise, b"\xff\xfe" + good, b"", b"[" * 200_000, good * 2))
        return self._post(rng.choice(_PATHS), bad)

    def _garbage_http(self, rng: random.Random) -> str:
        raw = rng.choice(
            (
                rng.randbytes(rng.choice((1, 100, 5000))),
                b"\x16\x03\x01" + rng.randbytes(200),
                b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 30_000,
                b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
                b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /%00%ff/../..//v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
                b"DELETE /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
                b"GET /v1/models/" + b"%c3%28" * 20 + b" HTTP/1.0\r\n\r\n",
                b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            )
        )
        return self._raw(raw, half_close=True)

    def _partial(self, rng: random.Random) -> str:
        whole = self._request(rng.choice(_PATHS), self._body(rng))
        with self._connect() as client:
            client.sendall(whole[: rng.randrange(1, len(whole))])
            if rng.random() < 0.5:  # a reset instead of an orderly end
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "left"

    def _wrong_framing(self, rng: random.Random) -> str:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        body = self._body(rng)
        raw = rng.choice(
            (
                head + b"Content-Length: -5\r\n\r\n" + body,
                head + b"Content-Length: 99999999999999999999\r\n\r\n" + body,
                head + b"Content-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n" + body,
                head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
                head + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n" + body,
                head + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n" + body,
                head + b"Content-Length: %d\r\n\r\n" % len(body) + body * 3,
            )
        )
        return self._raw(raw, half_close=True)

    def _gone(self, rng: random.Random) -> str:
        body = self._body(rng, max_tokens="200", ignore_eos="true", stream=rng.choice(("true", "false")))
        with self._connect() as client:
            client.sendall(self._request(rng.choice(_PATHS[:2]), body))
            time.sleep(rng.random() * 0.1)
        return "left"

    def _half_closed(self, rng: random.Random) -> str:
        return self._raw(self._request(rng.choice(_PATHS), self._body(rng)), half_close=True)

    def _slow(self, rng: random.Random) -> str:
        whole = self._request(rng.choice(_PATHS[:2]), self._body(rng))
        began = time.monotonic()
        with self._connect() as client:
            for byte in whole:
                client.sendall(bytes([byte]))
                time.sleep(0.05)
                if time.monotonic() - began > 20:
                    self._fail("a client that sends a byte each 50 ms is still connected after 20 s")
                    break
        return "dribbled to the end"

    def _request(self, path: str, body: bytes) -> bytes:
        return raw_post(path, body, "Connection: close")

    def _post(self, path: str, body: bytes) -> str:
        return self._raw(self._request(path, body), half_close=False)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._server.port), timeout=60)

    def _raw(self, raw: bytes, half_close: bool) -> str:
        with self._connect() as client:
            client.sendall(raw)
            if half_close:
                client.shutdown(socket.SHUT_WR)
            answer = b""
            while part := client.recv(1 << 16):
                answer = (answer + part)[:4096]
        return answer[9:12].decode("ascii", "replace") if answer.startswith(b"HTTP/1.1 ") else "closed"


def main() -> None:
    """Attack, and exit with 1 where the server did not stand it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    options = ("--request-read-timeout", "2", "--disable-access-log", "--num-threads", "1")
    with running(given.engine, *options) as server:
        attack = Attack(server, given.seed)
        first = _control(server)
        steps = 10
        marks: list[tuple[float, int]] = []
        with ThreadPoolExecutor(given.threads) as pool:
            for step in range(steps):
                share = range(step * given.requests // steps, (step + 1) * given.requests // steps)
                list(pool.map(attack.one, share))
                if _control(server) != first:
                    attack.failures.append(f"our own request is answered otherwise after {share.stop}")
                if httpx.get(server.url + "/health/ready", timeout=30).status_code != 200:
                    attack.failures.append(f"not ready after {share.stop}")
                marks.append((server.rss_mib(), server.open_files()))
                print(f"{share.stop}: {marks[-1][0]:.0f} MiB, {marks[-1][1]} files", flush=True)
        time.sleep(3)
        gauges = server.gauges()
        for name in ("num_requests_running", "num_requests_waiting", "kv_blocks_used"):
            if gauges[name]:
                attack.failures.append(f"{name} is {gauges[name]} at the end")
        if marks[-1][0] > marks[4][0] * 1.1 + 8:
            attack.failures.append(f"memory grew from {marks[4][0]:.0f} to {marks[-1][0]:.0f} MiB")
        if server.open_files() > marks[0][1] + 8:
            attack.failures.append(f"{server.open_files()} files are open at the end")
        if any("Traceback" in line for line in server.log):
            attack.failures.append("a trace in the log: " + "".join(server.log[-60:]))
    print(dict(attack.statuses.most_common()))
    report(attack.failures, f"{given.requests} hostile requests")


def _control(server: ServerProcess) -> Any:
    body = {"prompt": "One, two, three", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(server.url + "/v1/completions", content=json.dumps(body), timeout=60)
    return answer.status_code, answer.json().get("choices")


if __name__ == "__main__":
    main()
