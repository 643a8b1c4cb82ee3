"""An OpenAI-shaped server on a free loopback port that streams with delays that are known."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Behaviour:
    """How it answers.

    Attributes:
        first_delay: seconds before the first event with text.
        gap: seconds between events with text.
        tokens_per_event: what its usage counts for each.
        usage: whether it sends a usage event.
        refuse: the requests, by their place in the order of arrival, that get status 429.
        break_off: those whose stream ends in the middle.
        fail: those whose stream brings an error event.
        sent: filled with the times (``time.perf_counter``) at which the texts of each request were sent.
    """

    first_delay: float = 0.0
    gap: float = 0.0
    tokens_per_event: int = 1
    usage: bool = True
    refuse: set[int] = field(default_factory=set)
    break_off: set[int] = field(default_factory=set)
    fail: set[int] = field(default_factory=set)
    sent: dict[int, list[float]] = field(default_factory=dict)


@contextmanager
def serve(behaviour: Behaviour) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the base URL and the list of bodies that came."""
    bodies: list[dict[str, Any]] = []
    started = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None], int]] = []

    async def main() -> None:
        server = await asyncio.start_server(
            lambda reader, writer: _answer(reader, writer, behaviour, bodies), "127.0.0.1", 0
        )
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task, server.sockets[0].getsockname()[1]))
        started.set()
        async with server:
            await server.serve_forever()

    def work() -> None:
        with suppress(asyncio.CancelledError):  # the end of the server is no error
            asyncio.run(main())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(10)
    loop, task, port = running[0]
    try:
        yield f"http://127.0.0.1:{port}", bodies
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)


async def _answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    behaviour: Behaviour,
    bodies: list[dict[str, Any]],
) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET"):
        _plain(writer, 200, {"data": [{"id": "slow"}]})
        return
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    number = len(bodies)
    bodies.append(body)
    if number in behaviour.refuse:
        _plain(writer, 429, {"error": {"message": "the queue is full"}})
        return
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    chat = "messages" in body
    count = body.get("max_tokens") or body["max_completion_tokens"]

    def send(data: Any) -> None:
        writer.write(b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n")

    def choice(text: str, reason: str | None = None) -> dict[str, Any]:
        made = {"delta": {"content": text}} if chat else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": reason, **made}]}

    if chat:
        send(
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        )
    events = -(-count // behaviour.tokens_per_event)
    for i in range(events):
        await asyncio.sleep(behaviour.gap if i else behaviour.first_delay)
        if i == 1 and number in behaviour.break_off:
            writer.close()
            return
        if i == 1 and number in behaviour.fail:
            send({"error": {"message": "the engine failed"}})
            break
        behaviour.sent.setdefault(number, []).append(time.perf_counter())
        send(choice(f"w{i} "))
    else:
        send(choice("", "length"))
        if behaviour.usage:
            usage = {"prompt_tokens": 7, "completion_tokens": events * behaviour.tokens_per_event}
            send({"choices": [], "usage": usage})
    send(b"[DONE]")
    writer.close()


def _plain(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    writer.write(head.encode() + b"connection: close\r\n\r\n" + data)
    writer.close()
