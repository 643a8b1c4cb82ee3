"""The base of parsers whose calls stand in a section, each between markers of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from .parser import Parser
from .reader import Reading


class SectionParser(Parser):
    """Content, then sections of calls; the marker that opens a section may be missing, and that behind it."""

    #: What opens a section, what closes it, what opens each call.
    _open: ClassVar[str]
    _close: ClassVar[str]
    _call_open: ClassVar[str]

    @abstractmethod
    def _call(self) -> Reading[bool]:
        """Read a call behind its marker; False where it is none or broken, which is then said."""

    def _answer(self) -> Reading[None]:
        text = self._text
        while (yield from self._to_call(self._open, self._call_open)):
            while (yield from self._call()):
                if (yield from text.take(self._call_open)) is None:
                    yield from text.take(self._close)
                    yield from text.blanks()
                    break
                text.mark_before(self._call_open)

    def _marked_call(self, name: str, *closing: str, id: str | None = None) -> Reading[bool]:
        """A call whose arguments come next, and what of ``closing`` stands behind them."""
        text = self._text
        if not self._callable(name):
            self._give_up()
            return False
        yield from text.blanks()
        if not (yield from self._arguments(name, id)):
            return False
        text.mark()
        yield from text.blanks()
        for marker in closing:
            yield from text.take(marker)
            yield from text.blanks()
        return True
