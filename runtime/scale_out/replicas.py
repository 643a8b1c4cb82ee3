"""All replicas as one application: each request goes to one of them, and to another one where that has failed
before it answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from castiron.errors import RequestError

from ..server import errors
from ..server.error_forms import error_response
from ..server.errors import ApiError
from ..server.large_json import parse_json
from ..server.request_context import RequestContext, current
from ..server.service import SMALL_BODY_BYTES
from ..server.streaming import ClientGoneError, read_body, while_connected
from .asgi_call import HttpRequest
from .engine_of_all import SWAP, EngineOfAll
from .metrics import merge_metrics
from .prefix_router import PrefixRouter, prefix_keys
from .relay import HOP_HEADERS, Relay

_log = logging.getLogger("castiron.scale_out")
#: What changes a replica must change them all.
_FOR_ALL = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
#: Kept in the memory of the replica that made them.
_RESPONSES = "/v1/responses/"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_WATCH_SECONDS = 1.0
_ANSWER_SECONDS = 5.0


class Replicas:
    """An ASGI application over handles of Ray Serve.

    Args:
        handles: of deployments of ``Replica``.
        engine: the folder that they have loaded.
        max_body_bytes: larger bodies are refused.

    Attributes:
        draining: new work is refused.
    """

    def __init__(self, handles: Sequence[Any], engine: str, max_body_bytes: int) -> None:
        self.draining = False
        self._max_body_bytes = max_body_bytes
        self._handles = handles
        self._streams = [handle.options(stream=True) for handle in handles]
        self._router = PrefixRouter(len(handles))
        self._up = set(range(len(handles)))
        self._engine = EngineOfAll(engine, self._ask)
        #: The loop keeps no task alive by itself.
        self._tasks: set[asyncio.Task[None]] = set()
        self._bringing: dict[int, asyncio.Task[None]] = {}

    @property
    def unfinished(self) -> int:
        """Requests that replicas are at."""
        return sum(self._router.loads)

    @property
    def loads(self) -> list[int]:
        """The same of each replica."""
        return self._router.loads

    def app(self) -> ASGIApp:
        """The application, which watches the replicas while it lives."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            watching = asyncio.create_task(self._watch())
            yield
            watching.cancel()

        return Starlette(routes=[Route("/{path:path}", self)], lifespan=lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request, context = Request(scope, receive), current.get()
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            if path.startswith("/health"):
                await self._health(path)(scope, receive, send)
                return
            body = await read_body(request, self._max_body_bytes)
            given = HttpRequest(
                request.method,
                path,
                scope["query_string"],
                _headers(scope, context),
                body,
                scope.get("client"),
                None if context is None or context.key is None else context.key.name,
            )
            await while_connected(receive, self._answer(given, request, scope, send))
        except ClientGoneError:
            return
        except (ApiError, RequestError) as error:
            await error_response(path, error)(scope, receive, send)

    async def _answer(self, given: HttpRequest, request: Request, scope: Scope, send: Send) -> None:
        whole: Response | None = None
        if given.path == "/metrics":
            whole = await self._metrics(given)
        elif given.path == SWAP:
            whole = await self._engine.exchange(given, self._some_up())
        elif given.path in _FOR_ALL:
            answers = await self._ask(range(len(self._streams)), given)
            whole = next((a for a in answers if a.status_code >= 400), answers[0])
        elif given.path.startswith(_RESPONSES):
            answers = await self._ask(self._some_up(), given)
            whole = next((a for a in answers if a.status_code != 404), answers[0])
        elif (wanted := request.query_params.get("replica")) is not None and given.method == "GET":
            (whole,) = await self._ask([self._index(wanted)], given)
        elif self.draining and given.method == "POST":
            # A client that keeps the connection would ask the same server again.
            headers = {"Connection": "close", "Retry-After": "1"}
            raise ApiError(503, "the server is shutting down; send the request again", headers=headers)
        else:
            keys, earlier = await asyncio.to_thread(_read, given.body)
            await self._pass_on(given, keys, await self._owners(given, earlier), send)
        if whole is not None:
            await whole(scope, _nothing, send)

    async def _owners(self, given: HttpRequest, earlier: str | None) -> set[int]:
        """The replicas that can answer: one that has the response which the request goes on from, or all."""
        if earlier is None or not _ID.fullmatch(earlier):
            return set(self._up)
        up = self._some_up()
        asking = replace(given, method="GET", path=_RESPONSES + earlier, query=b"", body=b"")
        answers = await self._ask(up, asking)
        return {i for i, a in zip(up, answers, strict=True) if a.status_code == 200} or set(self._up)

    def _some_up(self) -> list[int]:
        if not self._up:
            raise ApiError(503, "no replica is up; try again", headers={"Retry-After": "5"})
        return sorted(self._up)

    async def _pass_on(self, given: HttpRequest, keys: list[bytes], able: set[int], send: Send) -> None:
        tried: set[int] = set()
        context = current.get()
        key = None if context is None else context.key
        while left := sorted((self._up & able) - tried):
            index = self._router.choose(keys, left)
            done = partial(self._router.done, index)
            relay = Relay(given.path, key, send, done, self._tasks)
            try:
                await relay.run(partial(self._streams[index].answer.remote, given))
                return
            except (ApiError, RequestError):  # the key's limits
                raise
            except Exception as error:  # Ray's, of many kinds; failures of the application are answers
                _log.warning("replica %d failed: %s", index, str(error).partition("\n")[0])
                self._down(index)
                tried.add(index)
                if await relay.ended():
                    return
        raise ApiError(503, "no replica is up that could answer; try again", headers={"Retry-After": "5"})

    async def _ask(self, indices: Sequence[int], given: HttpRequest) -> list[Response]:
        """The whole answers of some replicas."""

        async def one(index: int) -> Response:
            messages: list[Message] = []
            try:
                async for batch in self._streams[index].answer.remote(given):
                    messages += batch
            except Exception as error:  # Ray's
                return errors.response(ApiError(503, f"replica {index} does not answer: {error}"))
            head, *parts = messages
            made = Response(b"".join(part.get("body", b"") for part in parts), head["status"])
            made.raw_headers = [(n, v) for n, v in head["headers"] if n not in HOP_HEADERS]
            return made

        return list(await asyncio.gather(*map(one, indices)))

    async def _metrics(self, given: HttpRequest) -> Response:
        up = sorted(self._up)
        answers = await self._ask(up, given)
        texts = {i: bytes(a.body).decode() for i, a in zip(up, answers, strict=True) if a.status_code == 200}
        return Response(merge_metrics(texts), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _index(self, wanted: str) -> int:
        count = len(self._streams)
        if not (wanted.isascii() and wanted.isdigit() and len(wanted) < 9 and int(wanted) < count):
            raise ApiError(400, f"replica is {wanted[:20]!r}; expected 0 to {count - 1}", "replica")
        return int(wanted)

    def _health(self, path: str) -> Response:
        status = "failed" if not self._up else "draining" if self.draining else "ok"
        good = status == "ok" or path == "/health/live" or (path == "/health" and bool(self._up))
        body = {"status": status, "replicas": len(self._streams), "replicas_up": len(self._up)}
        return JSONResponse(body | {"unfinished_requests": self.unfinished}, 200 if good else 503)

    def _down(self, index: int) -> None:
        self._up.discard(index)
        self._router.forget(index)

    async def _watch(self) -> None:
        """Know which replicas are up before a request has to find out."""
        while True:
            await asyncio.gather(*map(self._check, range(len(self._handles))))
            await asyncio.sleep(_WATCH_SECONDS)

    async def _check(self, index: int) -> None:
        response = self._handles[index].check_health.remote()

        async def answer() -> str | None:
            folder: str | None = await response
            return folder

        try:
            folder = await asyncio.wait_for(answer(), _ANSWER_SECONDS)
        except Exception as error:  # Ray's, or no answer in time
            response.cancel()
            if index in self._up:
                _log.warning("replica %d is down: %s", index, str(error).partition("\n")[0] or "no answer")
                self._down(index)
        else:
            if not self._engine.is_right(folder):
                self._bring(index)
                return
            if index not in self._up:
                _log.warning("replica %d is up again", index)
            self._up.add(index)

    def _bring(self, index: int) -> None:
        """A replica that was started again has the first engine, and is up when it has that of the others."""
        self._down(index)

        async def bring() -> None:
            if not await self._engine.bring(index):
                _log.warning("replica %d cannot load the engine of the others", index)
            del self._bringing[index]

        if index not in self._bringing:
            self._bringing[index] = asyncio.create_task(bring())


def _headers(scope: Scope, context: RequestContext | None) -> list[tuple[bytes, bytes]]:
    """What the replica gets: the client's headers, but for the request's id and the span that it is below."""
    own: dict[bytes, bytes] = {}
    if context is not None:
        carried = {} if context.trace is None else context.trace.headers()
        own = {name.encode(): value.encode() for name, value in carried.items()}
        own[b"x-request-id"] = context.id.encode()
    kept = [(n, v) for n, v in scope["headers"] if n not in HOP_HEADERS and n not in own]
    return [*kept, *own.items()]


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def _read(body: bytes) -> tuple[list[bytes], str | None]:
    """Keys of the prompt, and the id of the response that it goes on from."""
    try:
        given = json.loads(body) if len(body) <= SMALL_BODY_BYTES else parse_json(body)
    except (ValueError, RecursionError):
        return [], None  # the replica says what is wrong
    if not isinstance(given, dict):
        return [], None
    earlier = given.get("previous_response_id")
    return prefix_keys(given), earlier if isinstance(earlier, str) else None
