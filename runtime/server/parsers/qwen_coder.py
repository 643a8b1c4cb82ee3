"""Qwen 3 Coder: ``<tool_call><function=name><parameter=key>text</parameter>...</function></tool_call>``."""

from __future__ import annotations

from .reader import Reading
from .tagged import MAX_NAME, TaggedParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class QwenCoderParser(TaggedParser):
    """Content, then calls; these models leave out the outer tag at times."""

    _value_end = PARAMETER_END
    _on_lines = True

    def _answer(self) -> Reading[None]:
        text = self._text
        while (yield from self._to_call(OPEN, FUNCTION)):
            head = yield from text.before(">", most=MAX_NAME)
            if head is None or not self._callable(name := head[0].strip()):
                self._give_up()
            elif (yield from self._tagged_call(name)):
                yield from text.blanks()
                yield from text.take(CLOSE)
                yield from text.blanks()

    def _key(self) -> Reading[str | None]:
        yield from self._text.blanks()
        if (yield from self._text.take(PARAMETER)) is None:
            return None
        head = yield from self._text.before(">", most=MAX_NAME)
        return None if head is None else head[0].strip()

    def _closed(self) -> Reading[bool]:
        yield from self._text.blanks()
        return (yield from self._text.take(FUNCTION_END, CLOSE)) is not None
