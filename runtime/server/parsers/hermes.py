"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as often as wanted."""

from __future__ import annotations

from .parser import Parser
from .reader import Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(Parser):
    """Content, then calls; content may go on behind them."""

    def _answer(self) -> Reading[None]:
        text = self._text
        while (yield from text.until((OPEN,), self._say)) is not None:
            text.mark_before(OPEN)
            yield from text.blanks()
            if (yield from self._call_object()):
                yield from text.blanks()
                yield from text.take(CLOSE)
                yield from text.blanks()
