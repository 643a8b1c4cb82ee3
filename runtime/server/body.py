"""Request bodies: read within limits, checked against the schema, every fault a 400 that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from .errors import ApiError
from .streaming import read_body

_Body = TypeVar("_Body", bound=BaseModel)


async def parse(request: Request, schema: type[_Body], limit: int) -> _Body:
    """The body as ``schema``, whatever content type the client names.

    Raises:
        ApiError: 400 with the field, or 413.
    """
    raw = await read_body(request, limit)
    try:
        return schema.model_validate_json(raw)
    except ValidationError as e:
        raise _refusal(e) from None


def validated(schema: type[_Body], fields: Mapping[str, Any]) -> _Body:
    """A body made of another one's fields; raises ApiError 400 with the field."""
    try:
        return schema.model_validate(fields)
    except ValidationError as e:
        raise _refusal(e) from None


def _refusal(error: ValidationError) -> ApiError:
    message, param = _first_problem(error.errors(include_url=False, include_context=False))
    return ApiError(400, message, param)


def _first_problem(errors: Sequence[Any]) -> tuple[str, str | None]:
    first = errors[0]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first['msg']}", None
    place = [str(p) for p in first["loc"]]
    if not place:
        return f"the body is not a JSON object: {first['msg']}", None
    shown = repr(first.get("input"))
    found = (
        "" if first["type"] == "missing" else f", found {shown if len(shown) < 80 else shown[:77] + '...'}"
    )
    return f"{'.'.join(place)[:200]}: {first['msg']}{found}", place[0][:200]
