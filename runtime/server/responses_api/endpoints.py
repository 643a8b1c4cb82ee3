"""/v1/responses: create, and what can be done with a response by its id."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...request_errors import called
from ..body import parse
from ..chat_turn import ChatTurn
from ..errors import ApiError, describe
from ..service import Service
from ..streaming import EventStream, while_connected
from .answer import ResponseStream, complete, fail, new_response
from .body import ResponsesBody
from .conversion import chat_body, input_items
from .store import ResponseStore, Stored


class Responses:
    """The endpoints of one server, and the responses that it keeps."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = ResponseStore()

    async def create(self, request: Request) -> Response:
        """Answer one request: whole, as a stream, or later (``background``)."""
        body = await parse(self._service, request, ResponsesBody)
        if body.background and body.store is False:
            raise ApiError(400, "background needs store: the response is fetched by its id", "background")
        if body.background and body.stream:
            raise ApiError(
                400, "a response in the background cannot be streamed; fetch it by its id", "background"
            )
        for name in ("conversation", "prompt"):
            if getattr(body, name) is not None:  # to ignore it would answer something else
                raise ApiError(400, f"{name} is not supported; send input, or previous_response_id", name)
        items, earlier = input_items(body), None
        if body.previous_response_id is not None:
            earlier = self._previous(body.previous_response_id)
            items = [*earlier.conversation, *items]
        convert = self._service.by_size if earlier is None else self._service.off_loop
        chat = await convert(lambda: chat_body(body, items))
        names = dict.fromkeys(("max_completion_tokens", "max_tokens"), "max_output_tokens")
        with called({**names, "messages": "input"}):
            turn = await ChatTurn.begin(self._service, chat)
        stored = Stored(new_response(body, turn.model), items)
        if earlier is not None:
            stored.input_size += earlier.size
        if body.stream:
            return self._streamed(turn, stored)
        if body.background:
            stored.response["status"] = "queued"
            stored.task = asyncio.create_task(self._work(turn, stored))
            self._store.put(stored)
            return JSONResponse(stored.response)
        try:
            await while_connected(request.receive, complete(turn, stored.response))
        finally:
            turn.close()
        self._keep(stored)
        return JSONResponse(stored.response)

    async def get(self, name: str) -> Response:
        """A response as it is now."""
        return JSONResponse(self._store.get(name).response)

    async def delete(self, name: str) -> Response:
        """Forget a response."""
        self._store.delete(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def cancel(self, name: str) -> Response:
        """End the work at a response in the background; one that has ended stays as it is."""
        stored = self._store.get(name)
        if not stored.response["background"]:
            raise ApiError(400, "only a response with background=true can be cancelled", "response_id")
        if stored.task is not None:
            stored.task.cancel()
            await asyncio.wait([stored.task])
        return JSONResponse(stored.response)

    def _previous(self, name: str) -> Stored:
        stored = self._store.get(name, "previous_response_id")
        if stored.response["status"] not in ("completed", "incomplete"):
            raise ApiError(
                400,
                f"the response {name!r} is {stored.response['status']}; it can be gone on with once complete",
                "previous_response_id",
            )
        return stored

    def _streamed(self, turn: ChatTurn, stored: Stored) -> Response:
        stream = ResponseStream(turn, stored.response)

        def close() -> None:
            turn.close()
            if stored.response["status"] != "in_progress":
                self._keep(stored)

        def failed(error: Exception) -> bytes:
            return stream.failed(describe(error)[1]["error"]["message"])

        return EventStream(stream.events(), close, failed, b"")

    async def _work(self, turn: ChatTurn, stored: Stored) -> None:
        stored.response["status"] = "in_progress"
        try:
            await complete(turn, stored.response)
        except asyncio.CancelledError:
            stored.response["status"] = "cancelled"
        except Exception as error:
            fail(stored.response, describe(error)[1]["error"]["message"])
        finally:
            turn.close()
            stored.task = None
            if self._store.has(stored):
                self._store.put(stored)

    def _keep(self, stored: Stored) -> None:
        if stored.response["store"]:
            self._store.put(stored)
