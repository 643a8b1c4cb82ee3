"""Server-sent events, and noticing that the client has gone, with a stream and without."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from json.encoder import encode_basestring
from typing import Any, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError, describe, shut_down

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"
#: Extension of a request's scope: puts a part of the body on its way at once, as ``send`` does, but without a
#: task having to wake up for it; False where it must go by ``send``: the client reads slowly, or has gone.
WRITE_NOW = "castiron.write_now"
#: Extension of a request's scope: says whether the client has gone, as early as that can be known.
IS_CLOSED = "castiron.is_closed"
#: A text that nothing else in an event looks like.
MARK = "\0mark of the text\0"
WriteNow: TypeAlias = Callable[[bytes], bool]


def event(data: dict[str, Any]) -> bytes:
    """One event with a JSON body."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """The same, named by its ``type``, as clients of Anthropic's API and of OpenAI's Responses expect."""
    return f"event: {data['type']}\n".encode() + event(data)


def text_event(data: dict[str, Any], mark: str) -> Callable[[str], bytes]:
    """Makes events that are ``data`` with another text in the place of ``mark``, which is in it once.

    For streams, where nothing else changes from token to token.
    """
    before, after = event(data).split(encode_basestring(mark).encode())

    def made(text: str) -> bytes:
        return before + encode_basestring(text).encode() + after

    return made


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most ``limit`` bytes; raises ClientGoneError when the client goes before its end."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    # What follows is not read, so that the connection is of no further use.
    message = f"the request body is larger than this server's limit of {limit} bytes"
    return ApiError(413, message, headers={"Connection": "close"})


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Wait for ``work`` and cancel it when the client goes; the body must have been read.

    Raises:
        ClientGoneError: the client has gone.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, watcher):
            if not each.done():
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await each


class EventStream(Response):
    """Sends events as they come and, also after an error, what ends the stream.

    Args:
        events: bytes to send.
        close: called in any case at the end: frees what the stream holds in the engine.
        failed: the event that tells of an error.
        ending: sent last.
        begun: called once the answer has begun, with the short way to the client where the server has one.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        failed: Callable[[Exception], bytes] = lambda error: event(describe(error)[1]),
        ending: bytes = DONE,
        begun: Callable[[WriteNow], None] | None = None,
    ) -> None:
        self._events = events
        self._close = close
        self._failed = failed
        self._ending = ending
        self._begun = begun
        self.status_code = 200
        self.background = None
        # Proxies must pass events on at once.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; ends quietly when the client goes."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            write_now = scope.get("extensions", {}).get(WRITE_NOW)
            if self._begun is not None and write_now is not None:
                self._begun(write_now)
            with contextlib.suppress(ClientGoneError, OSError):
                await while_connected(receive, self._send_all(send))
        except (
            asyncio.CancelledError
        ):  # a shutdown that waits no longer; a client that goes is no cancellation
            last = self._failed(shut_down()) + self._ending
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except (asyncio.CancelledError, OSError):
            raise
        except Exception as error:  # the status line is gone, so that the error travels as an event
            await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
        await send({"type": "http.response.body", "body": self._ending, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
