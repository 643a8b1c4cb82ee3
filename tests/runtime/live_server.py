"""A server on a free loopback port, in a thread of this process, over the twin of the core."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from castiron.runtime.async_engine import AsyncEngine
from castiron.runtime.server import serve as serving
from castiron.runtime.server.app import make_app
from castiron.runtime.server.front import FrontConfig
from castiron.runtime.server.listening import Listen
from castiron.runtime.server.service import ServerConfig, Service
from fake_core import FakeCore, make_session

#: Name of the thread that the event loop runs in.
THREAD = "server"


@contextmanager
def serve(
    core: FakeCore | None = None,
    *,
    max_queue_size: int | None = None,
    config: dict[str, Any] | None = None,
    listen: dict[str, Any] | None = None,
    front: FrontConfig | None = None,
    load_engine: Any = None,
    **info: Any,
) -> Iterator[tuple[str, Service]]:
    """Yields the base URL and the service; drains and stops at the end."""
    session = make_session(core, max_queue_size=max_queue_size, **info)
    with serve_session(session, config, listen, front, load_engine) as found:
        yield found


@contextmanager
def serve_session(
    session: Any,
    config: dict[str, Any] | None = None,
    listen: dict[str, Any] | None = None,
    front: FrontConfig | None = None,
    load_engine: Any = None,
) -> Iterator[tuple[str, Service]]:
    """The same over a session of any core, which is closed at the end."""
    service = Service(
        AsyncEngine(session),
        ServerConfig(**{"model_names": ("fake", "alias"), **(config or {})}),
        load_engine,
    )
    started, port = threading.Event(), [0]
    servers: list[Any] = []

    class Server(serving._Server):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            servers.append(self)

        def capture_signals(self) -> Any:  # signals belong to the test run
            from contextlib import nullcontext

            return nullcontext()

    def ready(actual: int) -> None:
        port[0] = actual
        started.set()

    original, serving._Server = serving._Server, Server  # type: ignore[misc]
    where = Listen(**{"port": 0, "shutdown_timeout": 5, **(listen or {})})
    thread = threading.Thread(
        target=serving.serve,
        args=(service, make_app(service, front), where),
        kwargs={"ready": ready},
        name=THREAD,
        daemon=True,
    )
    try:
        thread.start()
        assert started.wait(20), "the server did not start"
        yield where.url(port[0]), service
    finally:
        serving._Server = original  # type: ignore[misc]
        if servers:
            servers[0].handle_exit(15, None)
        thread.join(20)
        assert not thread.is_alive()
