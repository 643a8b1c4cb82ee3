"""Llama 3: the whole answer is ``{"name": ..., "parameters": {...}}``, or several with semicolons between."""

from __future__ import annotations

from .parser import Parser
from .reader import Reading

PYTHON_TAG = "<|python_tag|>"


class LlamaJsonParser(Parser):
    """Nothing marks a call but the answer's beginning, so only functions of the request are called."""

    def _answer(self) -> Reading[None]:
        text = self._text
        yield from text.blanks()
        self._give_up()
        yield from text.take(PYTHON_TAG)
        tagged = True
        while tagged:
            text.mark()
            yield from text.blanks()
            while (yield from text.peek()) == "{" and (yield from self._call_object(only_known=True)):
                yield from self._sign(";")
                text.mark()
            self._give_up()
            tagged = (yield from text.until((PYTHON_TAG,), self._say)) is not None
