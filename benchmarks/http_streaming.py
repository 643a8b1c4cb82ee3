"""What HTTP costs beside the engine: ``http_streaming.py ENGINE [--streams 64]``.

ENGINE ``tiny`` is made on the spot, with one layer of 32 features: a step of it takes so little that the
threads of Python are busy all the time.

The server runs in this process, clients in another. Printed: tokens/s through HTTP streams against the same
load given to the engine directly (``measure_throughput`` of ``castiron bench throughput``, same session);
microseconds of the processor for each token on the two Python threads, apart from the kernel's work on
sockets; and what HTTP adds to the time to the first token, with one request at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

#: The tests start a server within their process, as is done here.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "runtime"))
_TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--max-batch-size", type=int)
    parser.add_argument("--chat", action="store_true", help="send /v1/chat/completions, not /v1/completions")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        print(json.dumps(_clients(json.loads(given.client))))
        return
    print(json.dumps(_measure(given), indent=2))


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    import live_server
    from castiron.runtime.loading import open_session
    from castiron.runtime.options import RuntimeOptions

    options = RuntimeOptions(
        num_threads=given.num_threads, max_batch_size=given.max_batch_size, max_queue_size=1 << 20
    )
    session = _tiny(options) if given.engine == "tiny" else open_session(given.engine, options=options)
    _ = session.tokenizer
    with live_server.serve_session(session) as (url, _service):
        (loop,) = (t.native_id for t in threading.enumerate() if t.name == live_server.THREAD)
        threads = {"event_loop": loop, "events": session._thread.native_id}
        return _measure_server(given, session, int(url.rpartition(":")[2]), threads)


def _measure_server(
    given: argparse.Namespace, session: Any, port: int, threads: dict[str, int | None]
) -> dict[str, Any]:
    from castiron.runtime.bench import measure_throughput

    sizes = {"input_len": given.input_len, "output_len": given.output_len}
    result: dict[str, Any] = {"streams": given.streams, **sizes}

    def direct() -> float:
        return measure_throughput(
            session,
            **sizes,
            num_prompts=given.requests,
            max_concurrency=given.streams,
            num_iters=1,
            num_warmup=0,
            # Prompts that the engine has not seen: the prefix cache would answer those of an earlier round.
            seed=time.perf_counter_ns(),
        ).output_tokens_per_s

    # Ids of English: answers to random ones begin with pieces of characters, which have no text to send yet.
    page = (Path(__file__).resolve().parents[1] / "docs" / "architecture.md").read_text()
    english = session.tokenizer.encode(page)
    order = {**sizes, "english": english, "port": port, "requests": given.requests}
    order |= {"chat": given.chat, "streams": given.streams}
    direct()
    _in_process(order)
    engine, http, micros = [], [], {f"{n}_{k}": [] for n in threads for k in ("user", "kernel")}
    for _ in range(given.rounds):
        engine.append(direct())
        before = {name: _ticks(native) for name, native in threads.items()}
        done = _in_process(order)
        http.append(done["tokens"] / done["seconds"])
        for name, native in threads.items():
            for kind, old, new in zip(("user", "kernel"), before[name], _ticks(native), strict=True):
                micros[f"{name}_{kind}"].append((new - old) / _TICK / done["tokens"] * 1e6)
    result["engine_tokens_per_s"] = statistics.median(engine)
    result["http_tokens_per_s"] = statistics.median(http)
    result["http_to_engine"] = statistics.median(h / e for h, e in zip(http, engine, strict=True))
    result["microseconds_per_token"] = {name: statistics.median(values) for name, values in micros.items()}
    once = {**order, "streams": 1, "requests": 40, "output_len": 2}
    ttft_http, ttft_engine = [], []
    for _ in range(given.rounds):
        ttft_http += _in_process(once)["ttft"]
        ttft_engine += _engine_ttft(session, given.input_len, 40)
    result["ttft_ms_p50"] = {
        "http": statistics.median(ttft_http) * 1e3,
        "engine": statistics.median(ttft_engine) * 1e3,
    }
    result["ttft_ms_p50"]["added"] = result["ttft_ms_p50"]["http"] - result["ttft_ms_p50"]["engine"]
    return result


def _tiny(options: Any) -> Any:
    """The tiny engine of the tests, larger in everything but its layer, with a byte-level tokenizer."""
    import tempfile
    from dataclasses import replace

    import make_tokenizer
    from castiron.engines import Limits
    from castiron.runtime.loading import open_session
    from core_engine import tiny

    tiny.VOCAB = 300
    tiny.LIMITS = Limits(max_batch_size=256, max_num_tokens=512, max_logit_rows=256, max_seq_len=1024)
    tiny.TOKENS = tiny.TOKENS.model_copy(update={"vocab_size": 300, "vocab_size_used": 300})
    folder = Path(tempfile.mkdtemp())
    engine = tiny.write_tiny_engine(folder / "tiny", golden=False)
    session = open_session(engine, options=options)
    session.info = replace(session.info, tokenizer_dir=make_tokenizer.byte_level(folder))
    return session


def _engine_ttft(session: Any, input_len: int, count: int) -> list[float]:
    import random

    from castiron.runtime.bench import random_prompts, run_round

    rng = random.Random(time.perf_counter_ns())
    prompts = random_prompts(count, input_len, session.info.vocab_size, rng)
    return [run_round(session, [prompt], 2).timelines[0].ttft for prompt in prompts]


def _ticks(native: int | None) -> tuple[int, int]:
    fields = Path(f"/proc/self/task/{native}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]), int(fields[12])


def _in_process(order: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "-", "--client", json.dumps(order)]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    return found


def _clients(order: dict[str, Any]) -> dict[str, Any]:
    """Keep ``streams`` requests going until ``requests`` are done, with as little work as possible: the
    clients share the machine with the engine.
    """
    import random

    rng = random.Random(time.perf_counter_ns())
    selector = selectors.DefaultSelector()
    left, tokens, ttft = order["requests"], 0, []
    began_at: dict[socket.socket, float] = {}

    def start() -> None:
        nonlocal left
        left -= 1
        body: dict[str, Any] = {"stream": True, "ignore_eos": True, "max_tokens": order["output_len"]}
        body["temperature"] = 0
        if order["chat"]:
            words = " ".join(str(rng.randrange(10)) for _ in range(order["input_len"] // 2))
            body["messages"] = [{"role": "user", "content": words}]
        else:
            first = rng.randrange(len(order["english"]) - order["input_len"])
            body["prompt"] = order["english"][first : first + order["input_len"]]
        data = json.dumps(body).encode()
        path = "/v1/chat/completions" if order["chat"] else "/v1/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        client = socket.create_connection(("127.0.0.1", order["port"]))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began_at[client] = time.perf_counter()
        client.sendall(head.encode() + data)
        selector.register(client, selectors.EVENT_READ, [0, b""])

    began = time.perf_counter()
    for _ in range(min(order["streams"], left)):
        start()
    while selector.get_map():
        for key, _ in selector.select():
            client: Any = key.fileobj
            state = key.data
            part = client.recv(1 << 16)
            if not state[0] and b'"finish_reason"' in part and b'"role"' not in part:
                ttft.append(time.perf_counter() - began_at[client])
                state[0] = 1
            state[1] = (state[1] + part)[-200:]
            if not part:
                if b"[DONE]" not in state[1]:
                    raise SystemExit(f"a stream ended early: {state[1]!r}")
                tokens += order["output_len"]
                selector.unregister(client)
                client.close()
                if left:
                    start()
    return {"tokens": tokens, "seconds": time.perf_counter() - began, "ttft": ttft}


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
