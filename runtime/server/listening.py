"""Where the server listens: TCP or a Unix socket, with TLS or without."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from castiron.errors import EngineError

_BACKLOG = 2048
#: Seconds until a peer that is silent is asked whether it lives, between questions, and how many.
_KEEP_ALIVE = (60, 10, 6)
#: Milliseconds that a peer may leave what was sent unread or unacknowledged.
_UNREAD_TIMEOUT_MS = 120_000


def _no_pass_phrase() -> str:
    """In place of OpenSSL's question on the terminal, at which a server would wait for ever."""
    raise ValueError("the key is encrypted")


@dataclass(frozen=True)
class Listen:
    """Address and patience.

    Attributes:
        port: 0 takes a free one.
        uds: path of a Unix socket, in place of host and port.
        ssl_certfile, ssl_keyfile: PEM files; with them the server speaks TLS alone.
        ssl_ca_certs: PEM file; clients must show a certificate signed by one of these.
        shutdown_timeout: seconds that accepted requests get to finish after the signal.
        read_timeout: seconds that a client has to send a whole request.
        keep_alive_timeout: seconds that an idle connection is kept. Longer than what proxies keep one,
            which would otherwise send a request into a connection that is just being closed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    shutdown_timeout: float = 30.0
    read_timeout: float = 60.0
    keep_alive_timeout: int = 75

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return "http" if self.ssl_certfile is None else "https"

    def check(self) -> None:
        """Raise EngineError where TLS files are missing or do not belong together."""
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise EngineError(
                        f"--{name.replace('_', '-')} needs --ssl-certfile, the server's certificate"
                    )
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, _no_pass_phrase)
        except (OSError, ValueError) as e:
            raise EngineError(
                f"the certificate {self.ssl_certfile} with the key {self.ssl_keyfile or 'in the same file'} "
                f"cannot be used: {e}; expected PEM files that belong together, the key without a pass "
                "phrase (openssl pkey -in KEY -out NEW)"
            ) from None
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except OSError as e:
                raise EngineError(
                    f"{self.ssl_ca_certs} cannot be used: {e}; expected certificates in PEM"
                ) from None

    def url(self, port: int) -> str:
        """What a client takes as its base URL, without ``/v1``; of a Unix socket, by which it connects to any
        host, its path.
        """
        if self.uds is not None:
            return f"unix:{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{port}"


def open_sockets(listen: Listen) -> list[socket.socket]:
    """Sockets that listen at every address of the host.

    Raises:
        EngineError: an address cannot be listened on.
    """
    made: list[socket.socket] = []
    try:
        if listen.uds is not None:
            _leave_no_stale_socket(Path(listen.uds))
            made.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            made[0].bind(listen.uds)
        else:
            port = listen.port
            for family, kind, protocol, _, address in _addresses(listen.host, port):
                made.append(socket.socket(family, kind, protocol))
                _set_options(made[-1], family)
                made[-1].bind((address[0], port, *address[2:]))
                port = made[0].getsockname()[1]
        for each in made:
            each.listen(_BACKLOG)
            each.setblocking(False)
    except OSError as e:
        for each in made:
            each.close()
        where = listen.uds or f"{listen.host}:{listen.port}"
        choice = "--uds" if listen.uds is not None else "--port or --host"
        raise EngineError(f"the server cannot listen on {where}: {e}; choose another {choice}") from None
    return made


def check_address(listen: Listen) -> None:
    """Raise EngineError where the server could not listen, as ``open_sockets`` will; nothing stays open."""
    for made in open_sockets(listen):
        made.close()
    remove_socket_file(listen)


def remove_socket_file(listen: Listen) -> None:
    """Take the Unix socket's file away, if there is one."""
    if listen.uds is not None:
        with contextlib.suppress(OSError):
            os.unlink(listen.uds)


def _addresses(host: str, port: int) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    found: list[tuple[int, int, int, str, tuple[object, ...]]] = []
    for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        if entry not in found:
            found.append(entry)
    return found


def _set_options(made: socket.socket, family: int) -> None:
    # Connections inherit them. A client whose machine or network is gone sends no word of it, so that its
    # request would run to its end, and one that never reads its answer would be kept for ever.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), _KEEP_ALIVE, strict=True):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_TIMEOUT_MS)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)


def _leave_no_stale_socket(path: Path) -> None:
    """Remove what a server that was killed has left; OSError where something lives or lies there."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise OSError("a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError("another server listens there")
