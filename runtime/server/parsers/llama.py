"""Llama 3: the whole answer is ``{"name": ..., "parameters": {...}}``, or several with semicolons between."""

from __future__ import annotations

from .parser import Parser
from .reader import Reading

PYTHON_TAG = "<|python_tag|>"


class LlamaJsonParser(Parser):
    """Nothing marks a call but the answer's beginning, so only functions of the request are called."""

    _marked = False

    def _answer(self) -> Reading[None]:
        yield from self._calls_at_beginning(PYTHON_TAG, self._objects)

    def _objects(self) -> Reading[None]:
        text = self._text
        while (yield from text.peek()) == "{" and (yield from self._call_object()):
            yield from self._sign(";")
            text.mark()
