"""Where a JSON object ends, found while it arrives."""

from __future__ import annotations

import json
from typing import Any

_OPEN, _CLOSED_BY = "{[", {"{": "}", "[": "]"}
#: All that JSON has outside of strings, brackets and quotes aside.
_PLAIN = frozenset(" \t\r\n,:0123456789+-.eEtrufalsn")
_MAX_DEPTH = 128


class JsonScanner:
    """Follows brackets and strings of one object or array. Cheaper than a parser, and enough to find its end;
    ``json_object`` checks the whole.

    Attributes:
        complete: its last bracket has come.
        wrong: the next character is none that JSON could go on with.
    """

    __slots__ = ("_closers", "_escaped", "_in_string", "complete", "wrong")

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self.complete = False
        self.wrong = False

    @property
    def depth(self) -> int:
        """Open brackets."""
        return len(self._closers)

    def feed(self, text: str) -> int:
        """Follow ``text``; returns how many of its characters belong to the value."""
        for i, c in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._in_string = False
            elif not self._follow(c):
                self.wrong = True
                return i
            elif not self._closers:
                self.complete = True
                return i + 1
        return len(text)

    def _follow(self, c: str) -> bool:
        if c in _OPEN:
            self._closers.append(_CLOSED_BY[c])
            return len(self._closers) <= _MAX_DEPTH
        if not self._closers:
            return False
        if c == '"':
            self._in_string = True
        elif c == self._closers[-1]:
            self._closers.pop()
        else:
            return c in _PLAIN
        return True


def json_object(text: str) -> dict[str, Any] | None:
    """``text`` as an object; None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
