"""Grammars of calls in the forms that the parsers read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..tools import Function
from . import deepseek, glm, harmony, hermes, kimi, mistral, qwen_coder
from .lark import Lark
from .schema_types import argument_schemas, types_of

#: Names of arguments that can stand in a tag.
_TAG_NAME = re.compile(r"[^<>\s]([^<>\n]{0,126}[^<>\s])?")
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


def kimi_calls(lark: Lark, functions: Sequence[Function], several: bool, template: str) -> str:
    """``functions.name:0`` and the arguments, each between markers, in a section."""
    number = lark.terminal("/[0-9]{1,4}/")
    calls = [
        f"{lark.text(kimi.CALL_OPEN, f'{kimi.FUNCTIONS}{f.name}:')} {number} {lark.text(kimi.ARGUMENTS)} "
        f"{_arguments(lark, f)} {lark.text(kimi.CALL_CLOSE)}"
        for f in functions
    ]
    series = lark.series(lark.any_of(calls), "", several)
    return f"{lark.text(kimi.OPEN)} {series} {lark.text(kimi.CLOSE)}"


def qwen_coder_calls(lark: Lark, functions: Sequence[Function], several: bool, template: str) -> str:
    """A tag for the function, and one for each argument, on lines of their own."""
    calls = []
    for f in functions:
        head = lark.text(qwen_coder.OPEN, "\n", qwen_coder.FUNCTION, f"{f.name}>\n")
        tail = lark.text(qwen_coder.FUNCTION_END, "\n", qwen_coder.CLOSE)

        def argument(name: str, schema: Mapping[str, Any]) -> str:
            opening = lark.text(qwen_coder.PARAMETER, f"{name}>\n")
            return " ".join([opening, _tagged(lark, schema, qwen_coder.PARAMETER_END, "\n"), lark.text("\n")])

        calls.append(f"{head} {_each_argument(f, argument)} {tail}")
    return lark.series(lark.any_of(calls), lark.text("\n"), several)


def glm_calls(lark: Lark, functions: Sequence[Function], several: bool, template: str) -> str:
    """A tag for each name of an argument and one for its value, on lines of their own in older templates."""
    line = "\n" if re.search(r"</arg_key>(\n|\\n)", template) else ""

    def argument(name: str, schema: Mapping[str, Any]) -> str:
        opening = lark.text(glm.KEY, name, glm.KEY_END, line, glm.VALUE)
        return " ".join([opening, _tagged(lark, schema, glm.VALUE_END, ""), lark.text(line)])

    calls = [
        f"{lark.text(glm.OPEN, f.name, line)} {_each_argument(f, argument)} {lark.text(glm.CLOSE)}"
        for f in functions
    ]
    return lark.series(lark.any_of(calls), lark.text(line), several)


def _each_argument(function: Function, argument: Callable[[str, Mapping[str, Any]], str]) -> str:
    """Those that are required, then the others or not, in the order of the schema."""
    named = (function.parameters or {}).get("required")
    required: list[Any] = named if isinstance(named, list) else []
    must: list[str] = []
    may: list[str] = []
    for name, schema in argument_schemas(function.parameters).items():
        if _TAG_NAME.fullmatch(name):
            (must if name in required else may).append(argument(name, schema))
    return " ".join([*must, *(f"({item})?" for item in may)])


def _tagged(lark: Lark, schema: Mapping[str, Any], closing: str, line: str) -> str:
    """A value up to its closing tag; where it may be a text, any text up to the first such tag."""
    values = schema.get("enum")
    if isinstance(values, list) and values and all(_is_writable(v, closing) for v in values):
        return f"{lark.any_of([lark.text(v) for v in values])} {lark.text(line, closing)}"
    if "string" in types_of(schema):
        return lark.anything_to(closing)
    return f"{lark.json(schema)} {lark.text(line, closing)}"


def _is_writable(value: object, closing: str) -> bool:
    return isinstance(value, str) and value == value.strip() != "" and closing not in value


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
