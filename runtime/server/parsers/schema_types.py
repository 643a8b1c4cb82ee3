"""Arguments that are written as text: which JSON values their schemas let it mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ANY = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
#: As Python and models that have read much of it write them.
_WORDS = {"True": True, "False": False, "None": None}
_MAX_DEPTH = 16


def argument_schemas(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Schemas of a function's arguments by name, each with the definitions that it may refer to."""
    properties = (parameters or {}).get("properties")
    if parameters is None or not isinstance(properties, dict):
        return {}
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return {
        name: {**definitions, **part} if isinstance(part, dict) else {} for name, part in properties.items()
    }


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a value of a schema may have; all where it does not say."""
    return _types(schema, schema, 0)


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON value that a text means: itself, unless it is JSON of another type that the schema allows."""
    if types != {"string"}:
        try:
            bare = text.strip()
            value = _WORDS[bare] if bare in _WORDS else json.loads(bare, parse_constant=_refuse)
            if not isinstance(value, str) and types & _names(value):
                return json.dumps(value, ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _names(value: object) -> frozenset[str]:
    """What JSON schemas call the type of a value."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        whole = isinstance(value, int) or value.is_integer()
        return frozenset({"number", "integer"} if whole else {"number"})
    known = {type(None): "null", bool: "boolean", str: "string", list: "array"}
    return frozenset({known.get(type(value), "object")})


def _types(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ANY
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_found(reference, root), root, depth + 1)
    if "const" in schema:
        return _names(schema["const"])
    if isinstance(values := schema.get("enum"), list) and values:
        return frozenset[str]().union(*map(_names, values))
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named}) & ANY or ANY
    if isinstance(named, list):
        return frozenset(n for n in named if isinstance(n, str)) & ANY or ANY
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list) and options:
            return frozenset[str]().union(*(_types(option, root, depth + 1) for option in options))
    return ANY


def _found(reference: str, root: Mapping[str, Any]) -> object:
    found: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
