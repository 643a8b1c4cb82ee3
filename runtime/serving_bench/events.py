"""Server-sent events out of the pieces that a connection delivers."""

from __future__ import annotations


class EventParser:
    """Puts the ``data:`` of events together, however the stream is cut into pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that ``piece`` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif (
                not line and self._data
            ):  # an empty line ends an event; comments and other fields do not count
                events.append(b"\n".join(self._data))
                self._data = []
        return events
