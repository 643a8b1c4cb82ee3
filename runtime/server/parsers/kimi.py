"""Kimi K2: a section of calls, each ``functions.name:index``, a marker and ``{...}``."""

from __future__ import annotations

import re

from .parser import Parser
from .reader import Reading

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_OPEN, ARGUMENTS, CALL_CLOSE = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
FUNCTIONS = "functions."
_INDEX = re.compile(r":[0-9]+$")


class KimiParser(Parser):
    """What names the function is the call's id too: templates write it back, and results refer to it."""

    def _answer(self) -> Reading[None]:
        text = self._text
        while (marker := (yield from text.until((OPEN, CALL_OPEN), self._say))) is not None:
            text.mark_before(marker)
            if marker == OPEN:
                yield from text.blanks()
                if (yield from text.take(CALL_OPEN)) is None:
                    self._give_up()
                    continue
            while (yield from self._call()):
                if (yield from text.take(CALL_OPEN)) is None:
                    yield from text.take(CLOSE)
                    yield from text.blanks()
                    break
                text.mark_before(CALL_OPEN)

    def _call(self) -> Reading[bool]:
        text = self._text
        found = yield from text.before(ARGUMENTS, most=160)
        id = "" if found is None else found[0].strip()
        name = _INDEX.sub("", id.removeprefix(FUNCTIONS))
        if not self._callable(name):
            self._give_up()
            return False
        yield from text.blanks()
        if not (yield from self._arguments(name, id)):
            return False
        text.mark()
        yield from text.blanks()
        yield from text.take(CALL_CLOSE)
        yield from text.blanks()
        return True
