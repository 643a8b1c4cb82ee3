"""One engine, as an actor of Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.types import Message

from castiron.errors import EngineError

from ..async_engine import AsyncEngine
from ..loading import open_session
from ..options import RuntimeOptions
from ..server.app import make_app
from ..server.front import FrontConfig
from ..server.service import ServerConfig, Service
from ..server.tracing import Tracer
from .asgi_call import HttpRequest, call


class Replica:
    """Loads the engine and answers requests as ``castiron serve-engine`` does, over the same application.

    Args:
        engine: its folder, readable where the actor runs.
        runtime: fields of ``RuntimeOptions``.
        config: how the server behaves.
        swap: another engine may take its place.
        tracer: where it sends traces, and under which name; None = none.
    """

    def __init__(
        self,
        engine: str,
        runtime: dict[str, Any],
        config: ServerConfig,
        swap: bool,
        tracer: tuple[str, str] | None = None,
    ) -> None:
        self._front = FrontConfig(tracer=None if tracer is None else Tracer(*tracer))
        load = partial(open_session, options=RuntimeOptions(**runtime))
        self._service = Service(AsyncEngine(load(engine)), config, load if swap else None)
        self._app = make_app(self._service, self._front)

    async def answer(self, request: HttpRequest) -> AsyncIterator[list[Message]]:
        """The ASGI messages of the answer."""
        async for messages in call(self._app, request):
            yield messages

    async def check_health(self) -> str | None:
        """Asked by Ray Serve, which starts a replica again whose engine has died, and by the front.

        Returns the folder of the engine that has taken the first one's place.
        """
        if (failure := self._service.engine.session.failure) is not None:
            raise EngineError(failure)
        return self._service.exchanged_for

    def __del__(self) -> None:
        """Ray Serve ends a replica by this, after its requests."""
        if service := getattr(self, "_service", None):
            service.slot.close_now()
            if self._front.tracer is not None:
                self._front.tracer.close()
