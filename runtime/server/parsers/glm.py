"""GLM 4.5 and later: ``<tool_call>name<arg_key>key</arg_key><arg_value>text</arg_value>...</tool_call>``.

The older ones have line breaks between.
"""

from __future__ import annotations

from .reader import Reading
from .tagged import MAX_NAME, TaggedParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser(TaggedParser):
    """Content, then calls; content may go on behind them."""

    _value_end = VALUE_END
    _on_lines = False

    def _answer(self) -> Reading[None]:
        text = self._text
        while (yield from text.until((OPEN,), self._say)) is not None:
            text.mark_before(OPEN)
            yield from text.blanks()
            head = yield from text.before("\n", KEY, CLOSE, most=MAX_NAME)
            if head is None or not self._callable(name := head[0].strip()):
                self._give_up()
                continue
            text.back(text.place - len(head[1]))
            if (yield from self._tagged_call(name)):
                yield from text.blanks()

    def _key(self) -> Reading[str | None]:
        text = self._text
        yield from text.blanks()
        if (yield from text.take(KEY)) is None:
            return None
        head = yield from text.before(KEY_END, most=MAX_NAME)
        yield from text.blanks()
        return None if head is None or (yield from text.take(VALUE)) is None else head[0].strip()

    def _closed(self) -> Reading[bool]:
        yield from self._text.blanks()
        return (yield from self._text.take(CLOSE)) is not None
