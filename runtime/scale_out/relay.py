"""The answer of a replica on its way to the client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Send

from ..server.api_keys import KeyUse
from ..server.error_forms import error_events
from ..server.errors import ApiError
from .asgi_call import HOLD

#: Made for each connection, not to be passed on; the id of a request is this process's.
HOP_HEADERS = (b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", b"x-request-id")


class Relay:
    """Sends a replica's messages on.

    Args:
        path: of the request.
        key: the API key whose tokens the request holds.
        done: called when the replica is at the request no more, which may be after its answer.
        tasks: keeps those that wait for that.
    """

    def __init__(
        self,
        path: str,
        key: KeyUse | None,
        send: Send,
        done: Callable[[], None],
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self._path = path
        self._key = key
        self._send = send
        self._done = done
        self._tasks = tasks
        self._head: Message | None = None
        self._held = 0

    async def run(self, ask: Callable[[], Any]) -> None:
        """Send all of the stream that ``ask`` gives.

        Raises:
            ApiError, RequestError: the key has no room for the request; nothing was sent.
            Exception: whatever the stream raises.
        """
        stream: Any = None
        left = True
        try:
            stream = ask()
            async for batch in stream:
                for message in batch:
                    if message["type"] == HOLD:
                        self._hold(message["tokens"])
                    else:
                        await self._send(self._mine(message))
                if self._held and _is_last(batch[-1]):
                    # What is held beyond the answer is not the client's to free.
                    left = False
                    task = asyncio.create_task(self._rest(stream))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    return
            left = False
            self._end()
        finally:
            if left:
                if stream is not None:  # the client has gone, or the replica has: nobody listens any more
                    stream.cancel()
                self._end()

    async def _rest(self, stream: Any) -> None:
        try:
            with contextlib.suppress(Exception):  # Ray's: a replica that dies holds nothing
                async for _ in stream:
                    pass
        finally:
            self._end()

    def _hold(self, tokens: int) -> None:
        if self._key is not None:
            self._key.hold(tokens)
            self._held += tokens

    def _end(self) -> None:
        if self._key is not None:
            self._key.release(self._held)
        self._done()

    def _mine(self, message: Message) -> Message:
        if message["type"] != "http.response.start":
            return message
        self._head = message
        return {**message, "headers": [(n, v) for n, v in message["headers"] if n not in HOP_HEADERS]}

    async def ended(self) -> bool:
        """After a failure: whether the answer had begun; its end says then that it is not whole."""
        if self._head is None:
            return False
        body = b""
        if any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in self._head["headers"]):
            error = ApiError(503, "the replica failed while it answered; send it again")
            body = error_events(self._path, error)
        with contextlib.suppress(Exception):  # a body of a known length that is cut short: uvicorn objects
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        return True


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)
