"""DeepSeek V3 and R1: ``function<sep>name`` and fenced JSON for each call; V3.1: ``name<sep>{...}``."""

from __future__ import annotations

from .reader import Reading
from .section import SectionParser

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_OPEN, SEPARATOR, CALL_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "\n```json\n", "\n```"


class DeepSeekParser(SectionParser):
    """Both forms: the older one has the word "function" where the newer one has the name."""

    _open, _close, _call_open = OPEN, CLOSE, CALL_OPEN

    def _call(self) -> Reading[bool]:
        text = self._text
        found = yield from text.before(SEPARATOR, most=128)
        name = "" if found is None else found[0].strip()
        if name == "function" and (yield from text.peek()) != "{":
            fenced = yield from text.before(FENCE, most=128)
            name = "" if fenced is None else fenced[0].strip()
        return (yield from self._marked_call(name, FENCE_END.strip(), CALL_CLOSE))
