"""API keys: who may ask, and how much at once."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers

from castiron.errors import EngineError

from ..request_errors import ParameterError
from .errors import ApiError
from .yaml_file import read_mapping, refuse_unknown

_FIELDS = ("name", "key", "max_concurrent_requests", "max_tokens_in_flight")
_MIN_KEY_LENGTH = 8


@dataclass(frozen=True)
class ApiKey:
    """A key and what it may use at once; None = no limit of its own.

    Attributes:
        name: for logs and messages; the key itself is in neither.
        key: what clients send.
        max_concurrent_requests: requests that are being answered.
        max_tokens_in_flight: prompt tokens and ``max_tokens`` of the outputs that run or wait.
    """

    name: str
    key: str
    max_concurrent_requests: int | None = None
    max_tokens_in_flight: int | None = None


class KeyUse:
    """What runs under one key; only the event loop's thread touches it."""

    def __init__(self, key: ApiKey) -> None:
        self.name = key.name
        self._requests_limit = key.max_concurrent_requests
        self._tokens_limit = key.max_tokens_in_flight
        self.requests = 0
        self.tokens = 0

    def begin(self) -> None:
        """Count a request; ApiError 429 when as many run as the key may have."""
        if self._requests_limit is not None and self.requests >= self._requests_limit:
            raise _too_much(
                f"{self.requests} requests are running with this API key, as many as it may have at once"
            )
        self.requests += 1

    def end(self) -> None:
        """The request is answered."""
        self.requests -= 1

    def hold(self, tokens: int) -> None:
        """Count tokens until ``release``.

        Raises:
            ApiError: 429, the key's limit is reached for now.
            ParameterError: the tokens are more than the key may ever have.
        """
        limit = self._tokens_limit
        if limit is not None and tokens > limit:
            raise ParameterError(
                f"the request may take {tokens} tokens (prompts and max_tokens of all outputs), and this API "
                f"key may have {limit} at once; lower max_tokens, or send it in parts",
                "max_tokens",
            )
        if limit is not None and self.tokens + tokens > limit:
            raise _too_much(
                f"{self.tokens} tokens are in flight with this API key, the request may take {tokens} more, "
                f"and the key may have {limit} at once"
            )
        self.tokens += tokens

    def release(self, tokens: int) -> None:
        """The tokens of ``hold`` are done."""
        self.tokens -= tokens


class ApiKeys:
    """The keys that open the server.

    Raises:
        EngineError: a key is too short, or a key or a name is there twice.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        for key in keys:
            if len(key.key) < _MIN_KEY_LENGTH or not key.key.isascii() or not key.key.isprintable():
                raise EngineError(
                    f"the API key of {key.name!r} has {len(key.key)} characters; expected at least "
                    f"{_MIN_KEY_LENGTH} printable ASCII characters"
                )
        for what, values in (("key", [k.key for k in keys]), ("name", [k.name for k in keys])):
            if len(set(values)) != len(values):
                raise EngineError(f"two API keys have the same {what}; expected different ones")
        self._uses = [(_digest(key.key), KeyUse(key)) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._uses)

    def find(self, headers: Headers) -> KeyUse:
        """The key that a request brings, as a bearer token or as ``x-api-key``.

        Raises:
            ApiError: 401.
        """
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        given = given.strip()
        if not given:
            raise _unauthorized(
                "this server needs an API key; send it in the header 'Authorization: Bearer KEY'"
            )
        wanted, found = _digest(given), None
        # All of them are compared, and in constant time: how long it takes tells nothing about the keys.
        for digest, use in self._uses:
            if hmac.compare_digest(digest, wanted):
                found = use
        if found is None:
            raise _unauthorized("the API key is not one of this server's")
        return found


def read_key_file(path: str | Path) -> list[ApiKey]:
    """The keys of a YAML or JSON file: ``keys``, a list of name, key and limits.

    Raises:
        EngineError: the file cannot be read, or holds something else.
    """
    content = read_mapping(path, "the file of API keys")
    refuse_unknown(content, ("keys",), str(path))
    entries = content.get("keys")
    if not isinstance(entries, list) or not entries:
        raise EngineError(f"{path} has no keys; expected a list 'keys' with a name and a key in each entry")
    return [_entry(entry, f"{path}: entry {place} of keys") for place, entry in enumerate(entries, 1)]


def _entry(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, Mapping):
        raise EngineError(f"{where} is no mapping; expected name, key and limits")
    refuse_unknown(entry, _FIELDS, where)
    for field in ("name", "key"):
        if not isinstance(entry.get(field), str) or not entry[field]:
            raise EngineError(f"{where} has no {field}; expected text")
    for field in _FIELDS[2:]:
        value = entry.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise EngineError(f"{where}: {field} is {value!r}; expected an integer of at least 1")
    return ApiKey(
        entry["name"], entry["key"], entry.get("max_concurrent_requests"), entry.get("max_tokens_in_flight")
    )


def _digest(key: str) -> bytes:
    # Of equal length whatever is given, so that the comparison does not tell how long a key is.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _too_much(message: str) -> ApiError:
    return ApiError(429, f"{message}; try again later", headers={"Retry-After": "1"})
