"""The form that an answer must have: what the request says of it, between reasoning and calls of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..structured_output import StructuredOutput
from .parsers import AnswerStyle
from .parsers.json_scanner import json_object
from .parsers.lark import Lark
from .tools import ToolUse

#: Of a regular expression: a pair of backslash and character, or what would end it in a grammar.
_SPECIAL = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_ESCAPED = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}


def answer_form(
    wanted: StructuredOutput | None, use: ToolUse | None, style: AnswerStyle, opened: bool
) -> StructuredOutput | None:
    """The grammar of the whole output; None = free text.

    Calls that are required come alone. Where they are not, an answer of the wanted form may come in their
    place. Reasoning, where the model writes it, comes first and is free. A grammar of the user's own is taken
    as it is.

    Args:
        wanted: form of the answer to the user.
        use: functions that may be called; needs a style of tools.
        opened: the prompt has begun the reasoning.
    """
    required = use is not None and use.required
    if not required and (wanted is None or wanted.grammar is not None):
        return wanted
    if wanted is not None and use is None and style.reasoning is None:
        return wanted
    lark = Lark(style.special)
    ways = []
    if use is not None:
        ways.append(style.calls(lark, use.functions, use.parallel))
    if wanted is not None and not required:
        ways.append(style.final(lark, _expression(lark, wanted)))
    return StructuredOutput(lark=lark.grammar(f"{style.thoughts(lark, opened)} {lark.any_of(ways)}"))


def _expression(lark: Lark, wanted: StructuredOutput) -> str:
    if wanted.regex is not None:
        return lark.terminal(f"/{_SPECIAL.sub(lambda m: _ESCAPED.get(m[0], m[0]), wanted.regex)}/")
    if wanted.choice is not None:
        return lark.any_of([lark.text(text) for text in wanted.choice])
    kind, source = wanted.source
    assert kind == "json_schema"
    return lark.json(_schema(source))


def _schema(source: str) -> Mapping[str, object]:
    # Text that is no JSON is refused by the compiler of grammars, in its words.
    value = json_object(source)
    return {"type": source[:80]} if value is None else value
