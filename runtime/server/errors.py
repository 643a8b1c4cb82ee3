"""Every error in OpenAI's envelope: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from castiron.errors import EngineError, RequestError

from ..request_errors import AdapterNotFoundError, ContextLengthError, ParameterError, QueueFullError

_log = logging.getLogger("castiron.server")
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An answer other than 200, decided by the server itself."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers


def shut_down() -> ApiError:
    """For a request that the server's shutdown did not wait for."""
    return ApiError(503, "the server was shut down before the request was finished; send it again")


def envelope(
    status: int, message: str, param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """The body of an error; ``code`` is the status unless it has a name that clients know."""
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {
        "error": {"message": message, "type": kind, "param": param, "code": status if code is None else code}
    }


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an exception raised on the way to an answer."""
    if isinstance(error, ApiError):
        return error.status, envelope(error.status, str(error), error.param, error.code)
    if isinstance(error, ContextLengthError):
        return 400, envelope(400, str(error), error.param, "context_length_exceeded")
    if isinstance(error, AdapterNotFoundError):  # unloaded after the request had come in
        return 404, envelope(404, str(error), "model", "model_not_found")
    if isinstance(error, ParameterError):
        return 400, envelope(400, str(error), error.param)
    if isinstance(error, QueueFullError):
        return 429, envelope(429, str(error))
    if isinstance(error, RequestError):
        return 400, envelope(400, str(error))
    if isinstance(error, EngineError):
        return 503, envelope(503, str(error))
    _log.error("a request failed inside the server", exc_info=error)
    return 500, envelope(500, f"the server failed: {type(error).__name__}; its log has the trace")


def response(error: Exception) -> JSONResponse:
    """The whole answer for an exception."""
    status, body = describe(error)
    headers: Mapping[str, str] | None = None
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(error.retry_after)}
    elif isinstance(error, ApiError):
        headers = error.headers
    return JSONResponse(body, status, headers)


def install(app: FastAPI, count: Callable[[int], None]) -> None:
    """Make the app answer every failure in the envelope, and count it by status."""

    async def known(_: Request, error: Exception) -> JSONResponse:
        made = response(error)
        count(made.status_code)
        return made

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        count(error.status_code)
        return JSONResponse(envelope(error.status_code, str(error.detail)), error.status_code, error.headers)

    for kind in (ApiError, RequestError, EngineError, Exception):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
