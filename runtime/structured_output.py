"""StructuredOutput: the form that a request's text must have, checked at the edge."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .param_values import check_unicode, refuse, shown
from .request_errors import ParameterError

#: ``grammar`` is Lark or GBNF, ``lark`` Lark without a doubt.
Kind = Literal["json_schema", "regex", "grammar", "lark"]
#: Longer ones are somebody's mistake or somebody's attack.
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CHOICES = 4096


@dataclass(frozen=True)
class StructuredOutput:
    """The text must match; exactly one of the fields is given.

    Args:
        json: a JSON schema, as an object or as its text.
        json_object: any JSON object.
        regex: a regular expression (Rust's dialect) that the whole text matches.
        choice: one of these strings.
        grammar: a context-free grammar, Lark's notation or llama.cpp's GBNF.
        lark: a grammar in Lark's notation alone, which may quote anything.

    Raises:
        ParameterError: none or several are given, or one is of the wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    lark: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _FIELDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ParameterError(
                f"structured output has {' and '.join(given) or 'no form'}; expected exactly one of "
                f"{', '.join(_FIELDS)}",
                param="structured_outputs",
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if isinstance(self.json, Mapping):
            try:
                text = json.dumps(dict(self.json))
            except (TypeError, ValueError, RecursionError) as e:
                raise ParameterError(f"the JSON schema is not JSON: {e}", param="json") from None
            object.__setattr__(self, "json", text)
        for name in ("json", "regex", "grammar", "lark"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str) or not value:
                refuse(name, value, "a text")
            check_unicode(name, value)
            if len(value) > MAX_GRAMMAR_CHARS:
                raise ParameterError(
                    f"{name} has {len(value)} characters; expected at most {MAX_GRAMMAR_CHARS}", param=name
                )
        if self.json_object is not None and not isinstance(self.json_object, bool):
            refuse("json_object", self.json_object, "true")

    @property
    def source(self) -> tuple[Kind, str]:
        """The kind of grammar and its text, to be compiled."""
        if self.json is not None:
            return "json_schema", str(self.json)
        if self.json_object:
            return "json_schema", '{"type": "object"}'
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            # A JSON string is a string of Lark's, escapes included.
            return "lark", "start: " + " | ".join(json.dumps(text) for text in self.choice)
        if self.lark is not None:
            return "lark", self.lark
        return "grammar", str(self.grammar)


_FIELDS = ("json", "json_object", "regex", "choice", "grammar", "lark")


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        refuse("choice", value, "a list of strings")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise ParameterError(f"choice has {len(value)} entries; expected 1 to {MAX_CHOICES}", param="choice")
    for text in value:
        if not isinstance(text, str) or not text:
            raise ParameterError(f"choice holds {shown(text)}; expected strings", param="choice")
        check_unicode("choice", text)
    if sum(map(len, value)) > MAX_GRAMMAR_CHARS:
        raise ParameterError(f"choice has more than {MAX_GRAMMAR_CHARS} characters", param="choice")
    return tuple(value)
