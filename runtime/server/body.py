"""Request bodies: read within limits, checked against the schema, every fault a 400 that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from ..param_values import shown
from .errors import ApiError
from .large_json import LongIntegerError, parse_json
from .request_context import current
from .service import SMALL_BODY_BYTES, Service
from .streaming import read_body

_Body = TypeVar("_Body", bound=BaseModel)
#: How pydantic names the types that a field may have, in the place of an error.
_BRANCH = re.compile(r"str|int|float|bool|(list|dict|literal)\[.*")

#: What it says of a value that is no JSON text any more, where JSON has other words.
_OBJECT = re.compile(r"a valid dictionary(?: or instance of \w+)?")


async def parse(service: Service, request: Request, schema: type[_Body]) -> _Body:
    """The body as ``schema``, whatever content type the client names.

    Raises:
        ApiError: 400 with the field, or 413.
    """
    raw = await read_body(request, service.config.max_body_bytes)
    if (context := current.get()) is not None:
        context.body_bytes = len(raw)
    return await service.by_size(lambda: _read(schema, raw))


def _read(schema: type[_Body], raw: bytes) -> _Body:
    try:
        if len(raw) <= SMALL_BODY_BYTES:
            return schema.model_validate_json(raw)
    except ValidationError as e:
        if e.errors(include_url=False, include_context=False)[0]["type"] != "json_invalid":
            raise _refusal(e) from None
    try:  # large, or to be told what is wrong with it
        return schema.model_validate(parse_json(raw))
    except ValidationError as e:
        raise _refusal(e) from None
    except LongIntegerError as e:
        raise ApiError(400, f"{e.field or 'the body'}: found {e}", e.field) from None
    except ValueError as e:
        raise ApiError(400, f"the body is not valid JSON: {e}") from None


def validated(schema: type[_Body], fields: Mapping[str, Any]) -> _Body:
    """A body made of another one's fields; raises ApiError 400 with the field."""
    try:
        return schema.model_validate(fields)
    except ValidationError as e:
        raise _refusal(e) from None


def _refusal(error: ValidationError) -> ApiError:
    message, param = _first_problem(error.errors(include_url=False, include_context=False))
    message = _OBJECT.sub("an object", message).replace("a valid list", "a valid array")
    return ApiError(400, message, param)


def _first_problem(errors: Sequence[Any]) -> tuple[str, str | None]:
    first = _nearest(errors)
    place = [str(p) for p in first["loc"]]
    if not place:
        return f"the body is not a JSON object: {first['msg']}", None
    found = "" if first["type"] == "missing" else f", found {shown(first.get('input'))}"
    return f"{'.'.join(place)[:200]}: {first['msg']}{found}", place[0][:200]


def _nearest(errors: Sequence[Any]) -> Any:
    """The fault to tell: of a field that may have several types, of that which the value comes nearest to."""
    first = errors[0]
    branches: dict[str, Any] = {}
    for error in errors:
        place = error["loc"]
        if place[:1] == first["loc"][:1] and len(place) > 1 and _BRANCH.fullmatch(str(place[1])):
            branches.setdefault(place[1], error)
    if len(branches) < 2:
        return first
    mismatches = ("_type", "literal_error")
    near = [e for e in branches.values() if len(e["loc"]) > 2 or not e["type"].endswith(mismatches)]
    if near:  # the faulty item that comes last: so far the list was of that type
        found = max(near, key=lambda e: e["loc"][2] if isinstance(e["loc"][-1], int) else 0)
        return {**found, "loc": (found["loc"][0], *found["loc"][2:])}
    wanted = dict.fromkeys(e["msg"].removeprefix("Input should be ") for e in branches.values())
    return {**first, "loc": first["loc"][:1], "msg": f"Input should be {' or '.join(wanted)}"}
