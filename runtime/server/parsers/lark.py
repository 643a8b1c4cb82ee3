"""Writing grammars for llguidance: Lark with ``%json`` and special tokens by id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

#: As chat templates write JSON, and as models have seen it.
_ANYTHING = r"/(.|\n)*/"
_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark:
    """A grammar under construction.

    Args:
        special: ids of the tokenizer's special tokens by their text: they are no text to llguidance.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: list[str] = []

    def text(self, *parts: str) -> str:
        """An expression for these parts in a row; a part that is a special token is matched as one."""
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part)
            for part in parts
            if part
        )

    def rule(self, body: str) -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def terminal(self, body: str, lazy: bool = False) -> str:
        """Add a lexeme; returns its name. A lazy one ends as soon as it may."""
        name = f"r{len(self._rules)}" if lazy else f"T{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """An expression for a JSON value of a schema."""
        return self.rule("%json " + json.dumps({**schema, "x-guidance": _AS_WRITTEN}))

    def any_of(self, bodies: Sequence[str]) -> str:
        """An expression for one of several."""
        return self.rule(" | ".join(bodies))

    def series(self, item: str, separator: str, several: bool) -> str:
        """One item, or several with ``separator``, an expression or nothing, between them."""
        return f"{item} ({separator} {item})*" if several else item

    def anything_to(self, closing: str) -> str:
        """Any text up to a marker, and the marker."""
        if closing in self._special:
            return f"{self.terminal(_ANYTHING)} {self.text(closing)}"
        escaped = re.escape(closing).replace("/", r"\/")
        return self.terminal(f"{_ANYTHING[:-1]}{escaped}/", lazy=True)

    def blanks(self) -> str:
        """Blanks and line breaks, or nothing."""
        return self.terminal(r"/[\n ]*/")

    def grammar(self, start: str) -> str:
        """The whole, with what an answer is."""
        return "\n".join([f"start: {start}", *self._rules])
