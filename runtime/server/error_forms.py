"""Errors in the form that the API of a path has for them."""

from __future__ import annotations

from starlette.responses import Response

from . import errors
from .messages_api.answer import error_body
from .messages_api.endpoints import error_response as messages_error
from .streaming import DONE, event, named_event

_MESSAGES, _RESPONSES = "/v1/messages", "/v1/responses"


def error_response(path: str, error: Exception) -> Response:
    """A whole answer."""
    return messages_error(error) if path.startswith(_MESSAGES) else errors.response(error)


def error_events(path: str, error: Exception) -> bytes:
    """What ends a stream that has begun."""
    if path.startswith(_MESSAGES):
        return named_event(error_body(error)[1])
    _, body = errors.describe(error)
    if path.startswith(_RESPONSES):
        told = {"code": "server_error", "message": body["error"]["message"], "param": None}
        return named_event({"type": "error", **told})
    return event(body) + DONE
