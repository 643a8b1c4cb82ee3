"""Microseconds of Python for a token of a stream, in both threads: ``stream_token.py ENGINE [--streams 64]``.

The events of one step of the engine, a token for each stream, are routed again and again: on the session's
side from the events of the core to the updates in the mailbox, on the event loop's from there to the bytes
that are given to the transport, which here drops them. The best of many rounds counts, so that a busy
machine does not matter; ``http_streaming.py`` measures the whole server under load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from castiron.runtime.async_engine import AsyncEngine, _put_all
from castiron.runtime.loading import open_session
from castiron.runtime.options import RuntimeOptions
from castiron.runtime.outputs import Update
from castiron.runtime.request import Request
from castiron.runtime.sampling_params import SamplingParams
from castiron.runtime.server.completions import _Answer
from castiron.runtime.server.generation import Generation
from castiron.runtime.server.http_protocol import _write_now
from castiron.runtime.server.protocol import CompletionBody
from castiron.runtime.server.service import ServerConfig, Service
from castiron.runtime.session import Session

_ROUNDS = 2000
_GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--streams", type=int, default=64)
    given = parser.parse_args()
    options = RuntimeOptions(max_batch_size=given.streams, max_queue_size=1 << 20)
    session = open_session(given.engine, options=options)
    events = _one_step(session, given.streams)
    routing = _route(session, events)
    writing = asyncio.run(_write(session, given.streams))
    result = {
        "streams": given.streams,
        "session_us": routing,
        "event_loop_us": writing,
        "us_per_token": routing + writing,
    }
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))
    session.close()


def _one_step(session: Session, streams: int) -> list[Any]:
    """Events of a step with a token for each stream and nothing else."""
    seen: list[list[Any]] = []
    core = session.core
    poll = core.poll

    def watched(seconds: float) -> Any:
        events = poll(seconds)
        seen.append(list(events))
        return events

    session.core = SimpleNamespace(poll=watched, submit=core.submit, cancel=core.cancel, stats=core.stats)  # type: ignore[assignment]
    left, done = [streams], threading.Event()

    def sink(update: Update) -> None:
        left[0] -= update.finish_reason is not None
        if not left[0]:
            done.set()

    for k in range(streams):
        session.submit([100 + k, 101], _GREEDY, sink)
    done.wait()
    session.core = core
    for events in seen:
        if len(events) == streams and all(len(e.token_ids) == 1 and not e.finished for e in events):
            return events
    raise SystemExit("no step had one token for each stream: take a slower engine")


def _route(session: Session, events: list[Any]) -> float:
    mailbox: list[Any] = []
    tokenizer = session.need_tokenizer()
    for event in events:
        request = Request(
            [100, 101],
            _GREEDY,
            frozenset(),
            lambda: tokenizer.detokenizer([100, 101]),
            lambda u: mailbox.append((None, u)),
        )
        request.id = event.request_id
        request.queue_seconds = 0.0
        session._requests[event.request_id] = request
    hooks, session._after_batch = session._after_batch, []
    best = _best(lambda: session._route(events), mailbox.clear) / len(events)
    session._requests.clear()
    session._after_batch = hooks
    return best


async def _write(session: Session, streams: int) -> float:
    """The event loop's side: streams of /v1/completions, as they are after their first token."""
    service = Service(AsyncEngine(session), ServerConfig(("model",)))
    transport = SimpleNamespace(write=lambda data: None)
    flow = SimpleNamespace(write_paused=False)
    cycle: Any = SimpleNamespace(
        chunked_encoding=True, disconnected=False, response_complete=False, flow=flow, transport=transport
    )
    body = CompletionBody(prompt=[100, 101], stream=True)
    puts: list[Callable[[Update], None]] = []
    service.engine.start = lambda ids, params, put: puts.append(put)  # type: ignore[method-assign, assignment, return-value]
    for _ in range(streams):
        generation = Generation(service, [[100, 101]], _GREEDY)
        _Answer(service, body, generation, [None], 1).shorten(partial(_write_now, cycle))
        generation.choices[0].first_token = 1.0
        generation._reader_waits = True
    batch = [(put, Update(" word", [5])) for put in puts]
    return _best(lambda: _put_all(batch), lambda: None) / streams


def _best(work: Callable[[], object], tidy: Callable[[], None]) -> float:
    """Microseconds of the best round."""
    best = float("inf")
    for _ in range(_ROUNDS):
        tidy()
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best * 1e6


if __name__ == "__main__":
    main()
