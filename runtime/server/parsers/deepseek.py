"""DeepSeek V3 and R1: ``function<sep>name`` and fenced JSON for each call; V3.1: ``name<sep>{...}``."""

from __future__ import annotations

from .parser import Parser
from .reader import Reading

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_OPEN, SEPARATOR, CALL_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "\n```json\n", "\n```"


class DeepSeekParser(Parser):
    """Both forms: the older one has the word "function" where the newer one has the name."""

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
        found = yield from text.before(SEPARATOR, most=128)
        name = "" if found is None else found[0].strip()
        if name == "function" and (yield from text.peek()) != "{":
            fenced = yield from text.before(FENCE, most=128)
            name = "" if fenced is None else fenced[0].strip()
        if not self._callable(name):
            self._give_up()
            return False
        yield from text.blanks()
        if not (yield from self._arguments(name)):
            return False
        text.mark()
        yield from text.blanks()
        yield from text.take(FENCE_END.strip())
        yield from text.blanks()
        yield from text.take(CALL_CLOSE)
        yield from text.blanks()
        return True
