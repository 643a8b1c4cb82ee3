"""gpt-oss ("harmony"): messages in channels, ``<|channel|>analysis<|message|>...<|end|>``; a call is a
message to ``functions.NAME``.
"""

from __future__ import annotations

import re

from .parser import Parser
from .reader import Reading

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
#: A recipient may stand behind the channel, or in its place right behind the prompt's role.
TO_FUNCTIONS = "to=functions."
_RECIPIENT = re.compile(re.escape(TO_FUNCTIONS) + r"([^\s<]+)")
_MAX_HEAD = 256


class HarmonyParser(Parser):
    """Reads reasoning (the channel ``analysis``), content (``final``, ``commentary``) and calls alike."""

    def _answer(self) -> Reading[None]:
        text = self._text
        while (yield from text.peek()):
            text.mark()
            yield from text.blanks()
            begun = yield from text.take(START, CHANNEL, TO_FUNCTIONS)
            if begun is None:
                self._give_up()
                yield from text.until(ENDS, self._say)
                continue
            head = yield from text.before(MESSAGE, most=_MAX_HEAD)
            if head is None:
                self._give_up()
                yield from text.until(ENDS, self._say)
                continue
            yield from self._message(begun + head[0])

    def _message(self, head: str) -> Reading[None]:
        text = self._text
        recipient = _RECIPIENT.search(head)
        if recipient is not None and self._callable(recipient[1]):
            yield from text.blanks()
            if not (yield from self._arguments(recipient[1])):
                yield from text.until(ENDS, self._say)
                return
            text.mark()
            yield from text.until(ENDS, lambda _: None)
            return
        text.mark()
        thinks = "analysis" in head.partition(CONSTRAIN)[0]
        yield from text.until(ENDS, self._think if thinks else self._say)
