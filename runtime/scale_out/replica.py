"""One engine, as an actor of Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message

from castiron.errors import EngineError

from ..async_engine import AsyncEngine
from ..loading import open_session
from ..options import RuntimeOptions
from ..server.app import make_app
from ..server.service import ServerConfig, Service
from .asgi_call import HttpRequest, call


class Replica:
    """Loads the engine and answers requests as ``castiron serve-engine`` does, over the same application.

    Args:
        engine: its folder, readable where the actor runs.
        runtime: fields of ``RuntimeOptions``.
        config: how the server behaves.
    """

    def __init__(self, engine: str, runtime: dict[str, Any], config: ServerConfig) -> None:
        self._session = open_session(engine, options=RuntimeOptions(**runtime))
        self._service = Service(AsyncEngine(self._session), config)
        self._app = make_app(self._service)

    async def answer(self, request: HttpRequest) -> AsyncIterator[list[Message]]:
        """The ASGI messages of the answer."""
        async for messages in call(self._app, request):
            yield messages

    async def check_health(self) -> None:
        """Asked by Ray Serve, which starts a replica again whose engine has died, and by the front."""
        if self._session.failure is not None:
            raise EngineError(self._session.failure)

    def __del__(self) -> None:
        """Ray Serve ends a replica by this, after its requests."""
        if session := getattr(self, "_session", None):
            session.close()
