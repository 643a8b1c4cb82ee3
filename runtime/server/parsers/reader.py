"""Text that arrives in pieces, read by generators that stop where they need more of it.

A parser is written as if the whole text were there: it asks a ``TextReader`` for what comes next by ``yield
from``. Where the answer depends on text to come, the reader yields, and goes on when more has been fed. So
every decision depends on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from .json_scanner import JsonScanner

_T = TypeVar("_T")
#: A part of a parser: yields while it waits for text, and returns what it has read.
Reading: TypeAlias = Generator[None, None, _T]


class TextReader:
    """A cursor in the text so far. ``mark`` begins what ``raw`` gives back if it turns out to be nothing."""

    __slots__ = ("_at", "_ended", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False

    def feed(self, text: str) -> None:
        """More text."""
        self._text += text

    def end(self) -> None:
        """There is no more text."""
        self._ended = True

    def mark(self) -> None:
        """Forget the text before the cursor."""
        self._text = self._text[self._at :]
        self._at = 0

    def mark_before(self, marker: str) -> None:
        """Forget the text before ``marker``, which has just been read."""
        self._text = self._text[self._at - len(marker) :]
        self._at = len(marker)

    @property
    def raw(self) -> str:
        """The text from the mark to the cursor."""
        return self._text[: self._at]

    @property
    def place(self) -> int:
        """Characters from the mark to the cursor."""
        return self._at

    def back(self, place: int) -> None:
        """Put the cursor back to an earlier ``place``."""
        self._at = place

    def more(self) -> Reading[bool]:
        """Wait for more text; False when there is none."""
        if self._ended:
            return False
        yield
        return True

    def until(self, markers: Sequence[str], put: Callable[[str], None]) -> Reading[str | None]:
        """Pass text on as soon as it is certain, up to the first marker, which is read and returned.

        None at the end of the text. No marker may begin another.
        """
        while True:
            rest = self._text[self._at :]
            found = [(at, marker) for marker in markers if (at := rest.find(marker)) >= 0]
            if found:
                at, marker = min(found)
                self._at += at + len(marker)
                put(rest[:at])
                return marker
            certain = len(rest) if self._ended else len(rest) - _may_begin(rest, markers)
            self._at += certain
            put(rest[:certain])
            if not (yield from self.more()):
                return None

    def take(self, *options: str) -> Reading[str | None]:
        """Read the one of ``options`` that the text goes on with; None where it is none of them."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, options))]
            for option in options:
                if rest.startswith(option):
                    self._at += len(option)
                    return option
            if not any(option.startswith(rest) for option in options) or not (yield from self.more()):
                return None

    def peek(self) -> Reading[str]:
        """The next character, without reading it; empty at the end."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def blanks(self) -> Reading[None]:
        """Read white space."""
        while (yield from self.peek()).isspace():
            self._at += 1

    def before(self, *markers: str, most: int) -> Reading[tuple[str, str] | None]:
        """Read up to one of ``markers`` and the marker: both; None where none comes within ``most``
        characters.
        """
        window = most + max(map(len, markers))
        while True:
            rest = self._text[self._at : self._at + window]
            found = [(at, marker) for marker in markers if 0 <= (at := rest.find(marker)) <= most]
            if found:
                at, marker = min(found)
                self._at += at + len(marker)
                return rest[:at], marker
            if len(rest) == window or not (yield from self.more()):
                return None

    def step(self) -> None:
        """Read the character that ``peek`` has shown."""
        self._at += 1

    def json(self, scanner: JsonScanner, put: Callable[[str], None]) -> Reading[bool]:
        """Pass a JSON object or array on as it comes, until ``scanner`` has seen its end.

        False where the text is none: the cursor stands before the first wrong character, or at the end.
        """
        while True:
            rest = self._text[self._at :]
            used = scanner.feed(rest)
            self._at += used
            put(rest[:used])
            if scanner.complete:
                return True
            if scanner.wrong or not (yield from self.more()):
                return False


def _may_begin(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that a marker may begin with."""
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest
