"""Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}``."""

from __future__ import annotations

from .parser import Parser
from .reader import Reading

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(Parser):
    """Both forms: the first character behind the marker tells them apart."""

    def _answer(self) -> Reading[None]:
        text = self._text
        while (yield from text.until((OPEN,), self._say)) is not None:
            text.mark_before(OPEN)
            yield from text.blanks()
            if (yield from text.take("[")) is None:
                yield from self._named()
                continue
            while (yield from self._call_object()):
                if not (yield from self._sign(",")):
                    yield from text.take("]")
                    yield from text.blanks()
                    break

    def _named(self) -> Reading[None]:
        found = yield from self._text.before(CALL_ID, ARGUMENTS, "{", most=128)
        if found is not None and found[1] == CALL_ID:
            skipped = yield from self._text.before(ARGUMENTS, most=64)
            found = None if skipped is None else (found[0], ARGUMENTS)
        if found is None or not self._callable(name := found[0].strip()):
            self._give_up()
            return
        if found[1] == "{":
            self._text.back(self._text.place - 1)
        if (yield from self._arguments(name)):
            self._text.mark()
            yield from self._text.blanks()
