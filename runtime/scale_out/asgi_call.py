"""One request to an ASGI application in this process, for a caller elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from ..server.api_keys import ApiKey, KeyUse
from ..server.request_context import KEY_USE

_Messages = list[Message]
#: A message before the answer: the tokens that the request holds of its API key until the stream ends.
HOLD = "castiron.hold"


@dataclass(frozen=True)
class HttpRequest:
    """What the replica needs of a request; can be pickled."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None = None
    #: Name of the API key that it came with.
    key: str | None = None

    def scope(self) -> dict[str, Any]:
        """As ASGI has it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": self.client,
            "server": None,
        }


class ReportedKey(KeyUse):
    """The use of an API key whose limits another process knows: it is told what to hold."""

    def __init__(self, name: str, report: Callable[[Message], None]) -> None:
        super().__init__(ApiKey(name, ""))
        self._report = report
        self.free = asyncio.Event()
        self.free.set()

    def hold(self, tokens: int) -> None:
        """Tell; whoever refuses them stops listening to the answer."""
        super().hold(tokens)
        self.free.clear()
        self._report({"type": HOLD, "tokens": tokens})

    def release(self, tokens: int) -> None:
        """The stream of messages may end."""
        super().release(tokens)
        if not self.tokens:
            self.free.set()


async def call(app: ASGIApp, request: HttpRequest) -> AsyncIterator[_Messages]:
    """The application's messages, as many at once as there are. When the caller stops listening, the
    application is told that the client has gone, and ended if it does not end by itself.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=256)
    gone = asyncio.Event()
    body: list[bytes] = [request.body]
    key = None if request.key is None else ReportedKey(request.key, messages.put_nowait)

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app({**request.scope(), KEY_USE: key}, receive, messages.put)
            if key is not None:
                await key.free.wait()  # a response in the background goes on after its answer
        finally:
            await messages.put(None)

    task = asyncio.ensure_future(run())
    try:
        ended = False
        while not ended:
            batch = [await messages.get()]
            while not messages.empty():
                batch.append(messages.get_nowait())
            ended = batch[-1] is None
            if found := [message for message in batch if message is not None]:
                yield found
        await task
    finally:
        gone.set()
        if not task.done():
            while not messages.empty():  # nobody waits for them, and the application must not wait for room
                messages.get_nowait()
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(task, timeout=5)
