"""The application: routes and the error envelope, behind what every request passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import castiron

from ..step_trace import chrome_trace
from . import api_routes, errors, page
from .adapters import LoadBody, UnloadBody, load_adapter, unload_adapter
from .chat import chat_completions
from .completions import completions
from .engine_swap import SwapBody, swap_engine
from .errors import ApiError
from .front import Front, FrontConfig
from .load_log import log_load
from .openapi import request_schema
from .protocol import ChatBody, CompletionBody
from .service import Service
from .stats import get_stats
from .streaming import ClientGoneError

#: nginx's status for a client that closed the connection; only logs ever see it.
_CLIENT_GONE = 499


def make_app(service: Service, front: FrontConfig | None = None) -> Front:
    """The ASGI application over one engine; closes the engine when it shuts down."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # The loop keeps no task alive by itself.
        load_log = asyncio.create_task(log_load(service))
        yield
        load_log.cancel()
        await service.close()
        if front is not None and front.tracer is not None:
            await asyncio.to_thread(front.tracer.close)

    app = FastAPI(
        title="castiron",
        version=castiron.__version__,
        lifespan=lifespan,
        # These pages of FastAPI's fetch their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app, service.metrics.refused)
    app.add_exception_handler(ClientGoneError, _client_gone)

    @app.post("/v1/completions", openapi_extra=request_schema(CompletionBody))
    async def post_completions(request: Request) -> Response:
        return await _answer(completions(service, request))

    @app.post("/v1/chat/completions", openapi_extra=request_schema(ChatBody))
    async def post_chat_completions(request: Request) -> Response:
        return await _answer(chat_completions(service, request))

    api_routes.install(app, service, _answer)

    @app.get("/v1/models")
    async def get_models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in _names(service)]})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        if name not in _names(service):
            raise ApiError(404, f"the model {name[:200]!r} does not exist", "model", "model_not_found")
        return JSONResponse(_model(service, name))

    @app.post("/v1/load_lora_adapter", openapi_extra=request_schema(LoadBody))
    async def post_load_lora_adapter(request: Request) -> Response:
        return await load_adapter(service, request)

    @app.post("/v1/unload_lora_adapter", openapi_extra=request_schema(UnloadBody))
    async def post_unload_lora_adapter(request: Request) -> Response:
        return await unload_adapter(service, request)

    @app.post("/v1/engine/swap", openapi_extra=request_schema(SwapBody))
    async def post_engine_swap(request: Request) -> Response:
        return await swap_engine(service, request)

    @app.get("/health")
    async def health() -> Response:
        status, body = service.health()
        return JSONResponse(body, status)

    @app.get("/health/live")
    async def live() -> Response:
        # The process answers; only a dead engine is a reason to restart it.
        failure = service.engine.session.failure
        return JSONResponse(
            {"status": "ok" if failure is None else "failed"}, 200 if failure is None else 503
        )

    @app.get("/health/ready")
    async def ready() -> Response:
        status, body = service.health()
        if service.draining:
            status, body = 503, {**body, "status": "draining"}
        return JSONResponse(body, status)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": castiron.__version__})

    @app.get("/stats")
    async def stats(request: Request) -> Response:
        return await get_stats(service, request)

    @app.get("/trace")
    async def trace() -> Response:
        stats = await service.stats(1024)
        return JSONResponse(chrome_trace(stats.get("recent_steps", [])))

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await service.off_loop(service.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    if service.config.page:
        page.install(app)
    refuse = partial(api_routes.refuse, service)
    return Front(app, front or FrontConfig(), refuse, _route_names(app))


def _route_names(app: FastAPI) -> list[str]:
    return [
        f"{'|'.join(sorted(route.methods - {'HEAD'}))} {route.path}"
        for route in app.routes
        if isinstance(route, Route) and route.methods
    ]


async def _answer(work: Any) -> Response:
    try:
        response: Response = await work
    except asyncio.CancelledError:  # uvicorn would answer "Internal Server Error" and log a trace
        return errors.response(errors.shut_down())
    return response


async def _client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


def _names(service: Service) -> list[str]:
    return [*service.config.model_names, *service.adapter_paths()]


def _model(service: Service, name: str) -> dict[str, Any]:
    adapter = service.adapter_paths().get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "castiron",
        "root": service.engine.session.info.name if adapter is None else adapter,
        "parent": None if adapter is None else service.model,
        "max_model_len": service.engine.session.info.max_seq_len,
        "permission": [],
    }
