"""Running the application under uvicorn until a signal: drain, then leave with exit code 0."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from castiron.errors import EngineError

from .app import make_app
from .service import Service


class _Server(uvicorn.Server):
    """First signal: refuse new requests, finish the running ones. Second signal: leave at once."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self._service = service
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and not self.should_exit:
            listening = [s for server in self.servers for s in server.sockets]
            self._ready(listening[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own handler remembers the signal and raises it again at the end, which would make the exit
        # code that of a killed process, although everything was finished in order.
        if self._service.draining:
            self.force_exit = True
        self._service.draining = True
        self.should_exit = True


def serve(
    service: Service,
    host: str,
    port: int,
    *,
    shutdown_timeout: int,
    access_log: bool,
    log_level: str,
    ready: Callable[[int], None],
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        port: 0 takes a free one.
        shutdown_timeout: seconds that running requests get to finish after the signal.
        ready: called with the port when connections are accepted.

    Raises:
        EngineError: the address cannot be listened on.
    """
    config = uvicorn.Config(
        make_app(service),
        host=host,
        port=port,
        access_log=access_log,
        log_level=log_level,
        timeout_graceful_shutdown=shutdown_timeout,
        server_header=False,
        # The engine does the work; websockets would only be imported for nothing.
        ws="none",
    )
    server = _Server(config, service, ready)
    try:
        server.run()
    except SystemExit:
        raise EngineError(
            f"the server cannot listen on {host}:{port} (see the line above); choose another --port"
        ) from None
    if not server.started:
        raise EngineError(f"the server could not start on {host}:{port}")
