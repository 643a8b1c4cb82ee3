"""Kimi K2: a section of calls, each ``functions.name:index``, a marker and ``{...}``."""

from __future__ import annotations

import re

from .reader import Reading
from .section import SectionParser

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_OPEN, ARGUMENTS, CALL_CLOSE = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
FUNCTIONS = "functions."
_INDEX = re.compile(r":[0-9]+$")


class KimiParser(SectionParser):
    """What names the function is the call's id too: templates write it back, and results refer to it."""

    _open, _close, _call_open = OPEN, CLOSE, CALL_OPEN

    def _call(self) -> Reading[bool]:
        found = yield from self._text.before(ARGUMENTS, most=160)
        id = "" if found is None else found[0].strip()
        name = _INDEX.sub("", id.removeprefix(FUNCTIONS))
        return (yield from self._marked_call(name, CALL_CLOSE, id=id))
