"""HTTP/1.1 on a connection, with bounds on what a client may send before its request is complete."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .errors import envelope
from .lingering import LingeringTransport
from .streaming import IS_CLOSED, WRITE_NOW

#: Bytes of the request line and the headers, and of what else is no body (chunk sizes, trailers).
_MAX_HEAD_BYTES = 64 << 10
_LARGE_HEAD = f"the request's headers are larger than this server's limit of {_MAX_HEAD_BYTES} bytes"
#: A body in chunks of one byte each has six bytes around each of them.
_OVERHEAD_PER_BODY_BYTE = 8


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol, which waits for ever for a client that sends slowly and takes headers of any size.

    ``read_timeout`` seconds after its first byte a request must be complete, body included; a connection
    without a request is closed after the same time.
    """

    read_timeout: ClassVar[float] = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._body_bytes = 0
        #: A request has begun to come and is not complete.
        self._is_receiving = False
        self._field_bytes = 0  # of the headers of the request that is being read
        #: Requests that are not answered: uvicorn knows the one that came last.
        self._unanswered: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock: a connection is there to bring a request."""
        self._lingering = LingeringTransport(
            transport, self.loop, lambda: self._is_receiving, self.read_timeout
        )
        super().connection_made(cast("asyncio.Transport", self._lingering))
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock, and tell all that the client has gone."""
        self._stop_clock()
        self._lingering.stop()
        super().connection_lost(exc)
        for cycle in self._unanswered:
            _disconnect(cycle)

    def data_received(self, data: bytes) -> None:
        """Parse a piece, within the bounds."""
        if self._lingering.swallow(data):
            return
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._start_clock()
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES + _OVERHEAD_PER_BODY_BYTE * self._body_bytes:
            self._refuse(431, _LARGE_HEAD)

    def on_message_begin(self) -> None:
        """A request begins, perhaps while an earlier one is being answered."""
        super().on_message_begin()
        self._is_receiving = True
        self._field_bytes = 0
        if self._deadline is None:
            self._start_clock()

    def on_url(self, url: bytes) -> None:
        """Count it: a request that comes in one piece is complete before its bytes are looked at."""
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count it, as the path."""
        self._count_field(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request's handler starts: give it the short way to the socket."""
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            extensions = cast("dict[str, Any]", cycle.scope.setdefault("extensions", {}))
            extensions[WRITE_NOW] = partial(_write_now, cycle)
            extensions[IS_CLOSED] = partial(_is_closed, cycle)
            self._unanswered = [c for c in self._unanswered if not c.response_complete] + [cycle]
            if cycle.scope["http_version"] == "1.0":  # which knows no chunks: the connection's end is the end
                cycle.chunked_encoding = False
                cycle.expected_content_length = _AnyLength()

    def on_body(self, body: bytes) -> None:
        """Count a piece of the body apart from the rest."""
        self._head_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete: its client has done its part."""
        self._stop_clock()
        self._is_receiving = False
        self._head_bytes = self._body_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the envelope of all errors."""
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self.cycle.keep_alive = False  # it came behind a whole request, whose answer ends the connection
        else:
            self._refuse(*((431, _LARGE_HEAD) if self._field_bytes > _MAX_HEAD_BYTES else (400, msg)))

    def _count_field(self, size: int) -> None:
        self._field_bytes += size
        if self._field_bytes > _MAX_HEAD_BYTES:
            raise ValueError(_LARGE_HEAD)  # ends the parsing, and comes back as send_400_response

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: Java's clients ask for HTTP/2 in each request, and are answered without."""

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(self.read_timeout, self._too_slow)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.flow.read_paused:  # we do not read, so the client cannot be blamed
            self._start_clock()
        elif not self._head_bytes and not self._body_bytes:
            self.transport.close()
        else:
            self._refuse(408, f"the request was not complete after {self.read_timeout:g} seconds")
            self._lingering.close_now()  # it has had its time

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close, whatever the request's handler is doing."""
        if self.transport.is_closing():
            return
        self._stop_clock()
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = json.dumps(envelope(status, message)).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        for each in self._unanswered:
            _disconnect(each)
        self.transport.close()


class _AnyLength(int):
    """The length of a body that has none in its headers, as uvicorn counts it down."""

    def __lt__(self, sent: int) -> bool:
        return False

    def __sub__(self, sent: int) -> _AnyLength:
        return self

    def __ne__(self, left: object) -> bool:
        return False


def _disconnect(cycle: RequestResponseCycle) -> None:
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _is_closed(cycle: RequestResponseCycle) -> bool:
    """Whether nothing can be written: the transport knows it before the protocol is told."""
    if cycle.transport.is_closing():
        _disconnect(cycle)
    return cycle.disconnected


def _write_now(cycle: RequestResponseCycle, data: bytes) -> bool:
    if not cycle.chunked_encoding or cycle.response_complete or cycle.flow.write_paused or _is_closed(cycle):
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def bounded_http(read_timeout: float) -> type[BoundedHttp]:
    """The protocol with its time limit: uvicorn makes one of a class for each connection."""
    return type("BoundedHttp", (BoundedHttp,), {"read_timeout": read_timeout})
