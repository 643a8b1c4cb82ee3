"""Closing a connection whose client is still sending, so that it gets to read the answer.

A socket that is closed while there are bytes to read answers them with a reset, and the client's system then
throws away what it had received: the 413 that told it what was wrong (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

#: Seconds without a byte after which a client is taken to have stopped.
SILENCE: Final = 5.0
#: Bytes that are read for nothing.
MOST_BYTES: Final = 256 << 20


class LingeringTransport:
    """A transport whose ``close``, in the midst of a request, ends the sending alone at first.

    What comes then is read and thrown away, until the client closes, says nothing for ``SILENCE`` seconds,
    has sent ``MOST_BYTES``, or the time is over.

    Args:
        inner: the connection's own.
        is_receiving: whether a request has begun to come and is not complete.
        seconds: for all of it.
    """

    def __init__(
        self,
        inner: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        is_receiving: Callable[[], bool],
        seconds: float,
    ) -> None:
        self._inner = inner
        self._loop = loop
        self._is_receiving = is_receiving
        self._seconds = seconds
        self._lingers = False
        self._left = MOST_BYTES
        self._deadline = 0.0
        self._end: asyncio.TimerHandle | None = None
        self.write = inner.write  # each token comes here

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def is_closing(self) -> bool:
        """Whether nothing more will be sent."""
        return self._lingers or self._inner.is_closing()

    def close(self) -> None:
        """Send what is written, and close: now, or after having lingered. A second call closes now."""
        if self._lingers or self._inner.is_closing() or not self._is_receiving():
            self.close_now()
            return
        self._lingers = True
        self._deadline = self._loop.time() + self._seconds
        if self._inner.can_write_eof():  # TLS cannot: there the answer's own length says where it ends
            self._inner.write_eof()
        self._inner.resume_reading()
        self._wait()

    def close_now(self) -> None:
        """Close, whatever the client is sending."""
        self.stop()
        self._inner.close()

    def swallow(self, data: bytes) -> bool:
        """Whether the bytes came to a connection that lingers, and are gone."""
        if not self._lingers:
            return False
        self._left -= len(data)
        if self._left < 0:
            self.close_now()
        else:
            self._wait()
        return True

    def stop(self) -> None:
        """The connection is over, or about to be."""
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _wait(self) -> None:
        self.stop()
        left = self._deadline - self._loop.time()
        self._end = self._loop.call_later(max(0.0, min(SILENCE, left)), self.close_now)
