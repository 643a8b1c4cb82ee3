"""Which engine the replicas serve: all of them the same."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence

from starlette.responses import Response

from ..server.errors import ApiError
from .asgi_call import HttpRequest

SWAP = "/v1/engine/swap"
_Asking = Callable[[Sequence[int], HttpRequest], Awaitable[list[Response]]]


class EngineOfAll:
    """Exchanges the engine of one replica after the other, and back where one of them refuses.

    Args:
        first: folder of the engine that they begin with.
        ask: brings the whole answers of some replicas.

    Attributes:
        exchanging: replicas serve different ones for now.
    """

    def __init__(self, first: str, ask: _Asking) -> None:
        self._first = self._folder = first
        self._ask = ask
        self.exchanging = False

    async def exchange(self, given: HttpRequest, up: Sequence[int]) -> Response:
        """Have all that are up serve the engine of a request; the answer of the last, or of who refused."""
        if self.exchanging:
            raise ApiError(409, "another engine is being loaded; try again when that is done")
        self.exchanging = True
        done: list[int] = []
        try:
            for index in up:
                (answer,) = await self._ask([index], given)
                if answer.status_code != 200:
                    for each in done:
                        await self.bring(each)
                    return answer
                done.append(index)
            self._folder = str(json.loads(given.body)["engine"])
            return answer
        finally:
            self.exchanging = False

    def is_right(self, exchanged_for: str | None) -> bool:
        """Whether a replica that says so serves what all do; None = what it began with."""
        return self.exchanging or (exchanged_for or self._first) == self._folder

    async def bring(self, index: int) -> bool:
        """Have a replica serve what the others do; whether that went well."""
        body = json.dumps({"engine": self._folder}).encode()
        request = HttpRequest("POST", SWAP, b"", [(b"content-type", b"application/json")], body)
        (answer,) = await self._ask([index], request)
        return answer.status_code == 200
