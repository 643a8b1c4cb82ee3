"""Reasoning between two markers at the beginning of the answer: DeepSeek R1, Qwen 3, Magistral."""

from __future__ import annotations

from .deltas import Content, Delta
from .parser import Parser
from .reader import Reading


class ThinkParser(Parser):
    """Splits off the reasoning; the rest is content, which a parser of calls may read on.

    Args:
        markers: what opens and closes the reasoning.
        opened: the prompt has opened it already.
    """

    def __init__(self, markers: tuple[str, str], opened: bool) -> None:
        self._markers = markers
        self._opened = opened
        #: There is no more reasoning, and all text so far has been passed on.
        self.over = False
        super().__init__()

    def _answer(self) -> Reading[None]:
        text = self._text
        opening, closing = self._markers
        yield from text.blanks()
        if (yield from text.take(opening)) is not None or self._opened:
            yield from text.blanks()
            text.mark()
            yield from text.until((closing,), self._think)
            yield from text.blanks()
        else:
            self._say_at_once(text.raw)
        text.mark()
        self.over = True
        yield from text.until((), self._say_at_once)

    def _say_at_once(self, text: str) -> None:
        if text:
            self._found.append(Content(text))


class Reasoned:
    """A parser of reasoning and, for what is none, another one.

    Args:
        think: finds the reasoning.
        rest: reads the content that is left; None = it is content.
    """

    def __init__(self, think: ThinkParser, rest: Parser | None) -> None:
        self._think = think
        self._rest = rest

    def push(self, text: str) -> list[Delta]:
        """See ``Parser.push``."""
        if self._think.over and self._rest is not None:
            return self._rest.push(text)
        return self._read_on(self._think.push(text))

    def flush(self) -> list[Delta]:
        """See ``Parser.flush``."""
        found = self._read_on(self._think.flush())
        return found if self._rest is None else [*found, *self._rest.flush()]

    def _read_on(self, deltas: list[Delta]) -> list[Delta]:
        if self._rest is None:
            return deltas
        found: list[Delta] = []
        for delta in deltas:
            found += self._rest.push(delta.text) if isinstance(delta, Content) else [delta]
        return found
