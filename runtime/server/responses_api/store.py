"""Responses that clients may ask for again: in memory, bounded, the oldest go first."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ..errors import ApiError
from ..request_context import current

_MOST, _MOST_BYTES = 1024, 64 << 20


def _key_name() -> str | None:
    """Whose request the current task answers; None where the server has no keys."""
    request = current.get()
    return None if request is None or request.key is None else request.key.name


def _body_bytes() -> int:
    request = current.get()
    return 0 if request is None else request.body_bytes


@dataclass(eq=False)
class Stored:
    """A response and the conversation up to it.

    Attributes:
        response: the object as clients see it.
        items: input of the conversation so far, without this response's output.
        task: works at it in the background; None = it has ended.
        input_size: bytes of the items as JSON, about.
        size: the same with the response.
        key_name: of the API key that it was made with; there is none for other keys.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    task: asyncio.Task[None] | None = None
    input_size: int = field(default_factory=_body_bytes)
    size: int = 0
    key_name: str | None = field(default_factory=_key_name)

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Items that a following request begins with."""
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """For one event loop."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def put(self, stored: Stored) -> None:
        """Keep a response, or what has become of it."""
        self._forget(stored.response["id"])
        stored.size = stored.input_size + len(json.dumps(stored.response["output"]))
        self._found[stored.response["id"]] = stored
        self._bytes += stored.size
        while len(self._found) > _MOST or self._bytes > _MOST_BYTES:
            # What still runs has a task, which is bounded by the queue.
            oldest = next((name for name, one in self._found.items() if one.task is None), None)
            if oldest is None:
                break
            self._forget(oldest)

    def get(self, name: str, param: str | None = None) -> Stored:
        """A response by its id; ApiError 404 where there is none, or no more."""
        found = self._found.get(name)
        if found is None or found.key_name != _key_name():
            raise ApiError(
                404,
                f"there is no response {name[:80]!r}: responses are kept in memory, the last {_MOST}, unless "
                "store was false",
                param,
            )
        return found

    def has(self, stored: Stored) -> bool:
        """Whether a response is kept still."""
        return self._found.get(stored.response["id"]) is stored

    def delete(self, name: str) -> None:
        """Forget a response, and end its work."""
        stored = self.get(name)
        if stored.task is not None:
            stored.task.cancel()
        self._forget(name)

    def _forget(self, name: str) -> None:
        gone = self._found.pop(name, None)
        if gone is not None:
            self._bytes -= gone.size
