"""Grammars of calls in the forms that the parsers read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tools import Function
from . import deepseek, harmony, hermes, mistral
from .lark import Lark

#: Of a function that says nothing about its parameters.
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def hermes_calls(lark: Lark, functions: Sequence[Function], several: bool, template: str) -> str:
    """``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``."""
    call = lark.any_of(_objects(lark, functions, "arguments"))
    opening, closing = lark.text(hermes.OPEN, "\n"), lark.text("\n", hermes.CLOSE)
    return lark.series(lark.rule(f"{opening} {call} {closing}"), lark.text("\n"), several)


def llama_json_calls(lark: Lark, functions: Sequence[Function], several: bool, template: str) -> str:
    """``{"name": ..., "parameters": {...}}``, one: Llama's templates take no answer with several."""
    return lark.any_of(_objects(lark, functions, "parameters"))


def mistral_calls(lark: Lark, functions: Sequence[Function], several: bool, template: str) -> str:
    """A list of objects, or since ``[ARGS]`` name and arguments."""
    if mistral.ARGUMENTS in template:
        named = [
            f"{lark.text(mistral.OPEN, f.name, mistral.ARGUMENTS)} {_arguments(lark, f)}" for f in functions
        ]
        return lark.series(lark.any_of(named), "", several)
    call = lark.any_of(_objects(lark, functions, "arguments"))
    return f"{lark.text(mistral.OPEN, '[')} {lark.series(call, lark.text(', '), several)} {lark.text(']')}"


def deepseek_calls(lark: Lark, functions: Sequence[Function], several: bool, template: str) -> str:
    """V3 and R1 with fenced JSON where the template has it, else V3.1's form."""
    calls = []
    for f in functions:
        if "```json" in template:
            head = lark.text(deepseek.CALL_OPEN, "function", deepseek.SEPARATOR, f.name + deepseek.FENCE)
            tail = lark.text(deepseek.FENCE_END, deepseek.CALL_CLOSE)
        else:
            head = lark.text(deepseek.CALL_OPEN, f.name, deepseek.SEPARATOR)
            tail = lark.text(deepseek.CALL_CLOSE)
        calls.append(f"{head} {_arguments(lark, f)} {tail}")
    between = lark.text("\n") if "```json" in template else ""
    series = lark.series(lark.any_of(calls), between, several)
    return f"{lark.text(deepseek.OPEN)} {series} {lark.text(deepseek.CLOSE)}"


def harmony_calls(lark: Lark, functions: Sequence[Function], several: bool, template: str) -> str:
    """One message to a function: its end is the end of the turn."""
    calls = []
    for f in functions:
        head = lark.text(
            harmony.CHANNEL, f"commentary to=functions.{f.name} ", harmony.CONSTRAIN, "json", harmony.MESSAGE
        )
        calls.append(f"{head} {_arguments(lark, f)}")
    return lark.any_of(calls)


def pythonic_calls(lark: Lark, functions: Sequence[Function], several: bool, template: str) -> str:
    """``[name(key=value, ...), ...]``, values as in JSON."""
    call = lark.any_of(
        [f"{lark.text(f.name + '(')} {_keywords(lark, f)} {lark.text(')')}" for f in functions]
    )
    return f"{lark.text('[')} {lark.series(call, lark.text(', '), several)} {lark.text(']')}"


def _objects(lark: Lark, functions: Sequence[Function], key: str) -> list[str]:
    objects = []
    for f in functions:
        head = '{"name": "' + f.name + '", "' + key + '": '
        objects.append(f"{lark.text(head)} {_arguments(lark, f)} {lark.text('}')}")
    return objects


def _arguments(lark: Lark, function: Function) -> str:
    return lark.json(_schema(function))


def _schema(function: Function) -> dict[str, Any]:
    return {**function.parameters, "type": "object"} if function.parameters else _NOTHING


def _keywords(lark: Lark, function: Function) -> str:
    """The arguments in the order of the schema, those that are not required optional."""
    schema = _schema(function)
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return ""
    named = schema.get("required")
    required: list[Any] = named if isinstance(named, list) else []
    items = {}
    for name, part in properties.items():
        if name.isidentifier():
            value = lark.json({**definitions, **part} if isinstance(part, dict) else {})
            items[name] = f"{lark.text(name + '=')} {value}"
    must = [item for name, item in items.items() if name in required]
    may = [item for name, item in items.items() if name not in required]
    comma = lark.text(", ")
    if must:
        return " ".join([f" {comma} ".join(must), *(f"({comma} {item})?" for item in may)])
    # Whichever comes first has no comma before it.
    chains = [
        " ".join([item, *(f"({comma} {other})?" for other in may[i + 1 :])]) for i, item in enumerate(may)
    ]
    return f"({' | '.join(chains)})?" if chains else ""
