"""Running the application under uvicorn until a signal: drain, then leave with exit code 0."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn

from .front import Front
from .http_protocol import bounded_http
from .listening import Listen, open_sockets, remove_socket_file


class Drainable(Protocol):
    """What accepts requests until it is told to stop."""

    draining: bool

    @property
    def unfinished(self) -> int:
        """Requests that were accepted and are not answered."""


class _Server(uvicorn.Server):
    """First signal: refuse new requests, finish the accepted ones. Second signal: leave at once.

    While accepted requests run, the server goes on listening: probes must see that it is not ready, and
    clients that come meanwhile an answer that they can retry elsewhere.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Drainable,
        front: Front,
        patience: float,
        ready: Callable[[int], None],
    ) -> None:
        super().__init__(config)
        self._service = service
        self._front = front
        self._patience = patience
        self._ready = ready
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and not self.should_exit:
            address = sockets[0].getsockname() if sockets else ""
            self._ready(address[1] if isinstance(address, tuple) else 0)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own handler remembers the signal and raises it again at the end, which would make the exit
        # code that of a killed process, although everything was finished in order.
        if self._service.draining:
            self.force_exit = True
            self.should_exit = True
            self.config.timeout_graceful_shutdown = 0
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._service.draining and not self.should_exit:
            now = time.monotonic()
            if self._deadline is None:
                self._deadline = now + self._patience
            idle = not self._front.active and not self._service.unfinished
            if idle or now >= self._deadline:
                self.config.timeout_graceful_shutdown = max(0, math.ceil(self._deadline - now))
                self.should_exit = True
        return await super().on_tick(counter)


def serve(service: Drainable, app: Front, listen: Listen, *, ready: Callable[[int], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        service: what drains.
        app: of ``make_app`` over it.
        ready: called with the port (0 for a Unix socket) when connections are accepted.

    Raises:
        EngineError: the address cannot be listened on, or TLS files are wrong.
    """
    listen.check()
    sockets = open_sockets(listen)
    _allow_many_connections()
    config = uvicorn.Config(
        app,
        http=bounded_http(listen.read_timeout),
        access_log=False,  # ours has the request's id and its tokens
        log_config=None,
        timeout_keep_alive=listen.keep_alive_timeout,
        ssl_certfile=listen.ssl_certfile,
        ssl_keyfile=listen.ssl_keyfile,
        ssl_ca_certs=listen.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if listen.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        server_header=False,
        # The engine does the work; websockets would only be imported for nothing.
        ws="none",
    )
    try:
        _Server(config, service, app, listen.shutdown_timeout, ready).run(sockets)
    finally:
        remove_socket_file(listen)


def _allow_many_connections() -> None:
    """Each connection is a file, and the usual limit of 1,024 is meant for programs with few."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
