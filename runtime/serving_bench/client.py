"""One streamed request to a completions or chat endpoint, timed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from castiron.errors import RequestError

from .events import EventParser
from .outcome import Outcome

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """Where requests go, and what is the same in all of them.

    Attributes:
        base_url: scheme, host and port, and a prefix if the server has one.
        endpoint: the path; decides between completions and chat.
        model: the name in requests.
        headers: of every request.
        extra_body: fields of every request; they win over the benchmark's own.
        timeout: seconds that one request may take.
    """

    base_url: str
    endpoint: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        if not self.endpoint.rstrip("/").endswith("/completions"):
            raise RequestError(
                f"--endpoint is {self.endpoint!r}; expected a path that ends in /completions or "
                "/chat/completions, such as /v1/completions"
            )

    @property
    def is_chat(self) -> bool:
        """Whether requests are conversations."""
        return self.endpoint.rstrip("/").endswith("/chat/completions")

    @property
    def url(self) -> str:
        """The whole address."""
        return self.base_url.rstrip("/") + "/" + self.endpoint.lstrip("/")

    def body(self, messages: Sequence[Message], output_len: int) -> dict[str, Any]:
        """The request for the answer to ``messages``; a completions endpoint gets their text, joined."""
        made: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            made |= {"messages": list(messages), "max_completion_tokens": output_len}
        else:
            made |= {"prompt": "".join(str(m["content"]) for m in messages), "max_tokens": output_len}
        return made | dict(self.extra_body)


class Client:
    """A pool of connections that grows with the requests; to be used as a context manager."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._target.headers,
            timeout=aiohttp.ClientTimeout(total=self._target.timeout),
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, messages: Sequence[Message], output_len: int) -> Outcome:
        """Send a request and read its stream to the end; failures are in the outcome."""
        assert self._session is not None
        body = json.dumps(self._target.body(messages, output_len), ensure_ascii=False).encode()
        outcome = Outcome(time.perf_counter())
        try:
            headers = {"Content-Type": "application/json"}
            async with self._session.post(self._target.url, data=body, headers=headers) as answer:
                if answer.status != 200:
                    outcome.error = f"HTTP {answer.status}: {_message(await answer.text())}"
                else:
                    await _read(answer.content, outcome)
        except (asyncio.TimeoutError, TimeoutError):
            outcome.error = f"no end after {self._target.timeout:g} s"
        except (aiohttp.ClientError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended = outcome.ended or time.perf_counter()
        return outcome


async def _read(content: aiohttp.StreamReader, outcome: Outcome) -> None:
    parser = EventParser()
    texts: list[str] = []
    finished = False
    async for piece in content.iter_any():
        now = time.perf_counter()
        for data in parser.feed(piece):
            if data == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                outcome.error = f"the stream holds an event that is no JSON object: {data[:200]!r}"
                return
            if event.get("error"):
                outcome.error = f"in the stream: {_message(data.decode(errors='replace'))}"
                return
            finished |= _take(event, outcome, texts, now)
            outcome.ended = now
    outcome.text = "".join(texts)
    if not outcome.counted_by_server:
        outcome.output_tokens = len(outcome.token_times)
    if not finished:
        outcome.error = "the stream ended before the answer did (no finish_reason)"
    elif not outcome.token_times:
        outcome.error = "the answer has no text"


def _take(event: dict[str, Any], outcome: Outcome, texts: list[str], now: float) -> bool:
    """Note what an event brings; whether the answer ends with it."""
    if usage := event.get("usage"):
        outcome.prompt_tokens = usage.get("prompt_tokens")
        if usage.get("completion_tokens") is not None:
            outcome.output_tokens, outcome.counted_by_server = usage["completion_tokens"], True
    ends = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        # A chat's first event carries its role alone: no token has come.
        new = [
            choice.get("text"),
            delta.get("content"),
            delta.get("reasoning") or delta.get("reasoning_content"),  # servers send one, or both alike
        ]
        given = "".join(text for text in new if text)
        ends = ends or choice.get("finish_reason") is not None
        if given or choice.get("token_ids"):
            outcome.token_times.append(now)
            texts.append(given)
    return ends


def _message(text: str) -> str:
    """The message of an error envelope, or the beginning of whatever came instead."""
    try:
        found = json.loads(text)
        found = found.get("error", found)
        return str(found["message"] if isinstance(found, dict) else found)[:300]
    except (ValueError, AttributeError, KeyError, TypeError):
        return text.strip()[:300]
