"""The options of ``serve-engine`` that are about HTTP: where it listens, whom it lets in, what it logs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from castiron.errors import EngineError

from .common import FiniteRange, comma_lists

if TYPE_CHECKING:
    from castiron.runtime.server.front import FrontConfig
    from castiron.runtime.server.listening import Listen

_Function = TypeVar("_Function", bound=Callable[..., Any])
_file = click.Path(exists=True, dir_okay=False)

_OPTIONS = (
    click.option("--host", default="127.0.0.1", help="Address to listen on."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port; 0 = any free one."),
    click.option("--uds", type=click.Path(), help="Listen on this Unix socket, not on host and port."),
    click.option("--root-path", default="", help="Prefix of all paths, behind a proxy that has others."),
    click.option("--ssl-certfile", type=_file, help="Certificate in PEM: serve HTTPS alone."),
    click.option("--ssl-keyfile", type=_file, help="Its key, if that is in a file of its own."),
    click.option("--ssl-ca-certs", type=_file, help="Let in clients alone that have a certificate of these."),
    click.option(
        "--api-key",
        multiple=True,
        help="Clients must send one of these (in the variable: between spaces). With any key all paths but "
        "/health, /health/live, /health/ready and the page need one. Other users of the machine see command "
        "lines.",
    ),
    click.option("--api-key-file", type=_file, help="YAML or JSON with more keys, each with limits."),
    click.option(
        "--allowed-origins",
        multiple=True,
        callback=comma_lists,
        help="Web pages of these origins may call the server (* = all).",
    ),
    click.option(
        "--allowed-methods", multiple=True, callback=comma_lists, default=("*",), help="Methods for those."
    ),
    click.option(
        "--allowed-headers", multiple=True, callback=comma_lists, default=("*",), help="Headers for those."
    ),
    click.option("--allow-credentials", is_flag=True, help="Those may send cookies."),
    click.option(
        "--request-read-timeout",
        type=FiniteRange(0, 1e6, min_open=True),
        default=60.0,
        help="Seconds that a client has to send a whole request.",
    ),
    click.option(
        "--keep-alive-timeout",
        type=click.IntRange(min=1),
        default=75,
        help="Seconds that an idle connection is kept.",
    ),
    click.option(
        "--shutdown-timeout",
        type=FiniteRange(0, 1e6),
        default=30.0,
        help="Seconds to finish after SIGTERM.",
    ),
    click.option("--disable-access-log", is_flag=True, help="Log no line for each request."),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="Least level of the log, which goes to stderr.",
    ),
    click.option(
        "--log-format", type=click.Choice(["text", "json"]), default="text", help="Lines, or JSON objects."
    ),
    click.option(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="Send OpenTelemetry traces there: http://HOST:4318/v1/traces. Needs castiron[otel].",
    ),
    click.option("--log-prompts", is_flag=True, help="Also log the text of prompts."),
)
_NAMES = (
    *("host", "port", "uds", "root_path", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
    *("api_key", "api_key_file", "allowed_origins", "allowed_methods", "allowed_headers"),
    *("allow_credentials", "request_read_timeout", "keep_alive_timeout", "shutdown_timeout"),
    *("disable_access_log", "log_level", "log_format", "log_prompts"),
    "otlp_traces_endpoint",
)


def server_options(function: _Function) -> _Function:
    """Add the options; the command gets what was given as the dict ``http``."""

    @functools.wraps(function)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        http = {name: kwargs.pop(name) for name in _NAMES}
        return function(*args, http=http, **kwargs)

    for add in reversed(_OPTIONS):
        gathered = add(gathered)
    return gathered  # type: ignore[return-value]


def listen_of(http: dict[str, Any]) -> Listen:
    """Where the server listens; raises EngineError where TLS files cannot be used."""
    from castiron.runtime.server.listening import Listen

    same = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    made = Listen(
        **{name: http[name] for name in (*same, "shutdown_timeout", "keep_alive_timeout")},
        read_timeout=http["request_read_timeout"],
    )
    made.check()
    return made


def front_of(http: dict[str, Any]) -> FrontConfig:
    """Whom the server lets in; raises EngineError where keys or origins make no sense."""
    from castiron.runtime.server.api_keys import ApiKey, ApiKeys, read_key_file
    from castiron.runtime.server.front import CrossOrigin, FrontConfig
    from castiron.runtime.server.tracing import Tracer

    keys = [ApiKey(f"--api-key {place}", key) for place, key in enumerate(http["api_key"], 1)]
    if http["api_key_file"] is not None:
        keys += read_key_file(http["api_key_file"])
    cross_origin = CrossOrigin(
        http["allowed_origins"], http["allowed_methods"], http["allowed_headers"], http["allow_credentials"]
    )
    cross_origin.check()
    endpoint = http["otlp_traces_endpoint"]
    if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
        raise EngineError(
            f"--otlp-traces-endpoint is {endpoint[:200]!r}; expected an address such as "
            "http://HOST:4318/v1/traces"
        )
    return FrontConfig(
        ApiKeys(keys),
        cross_origin,
        http["root_path"],
        not http["disable_access_log"],
        None if endpoint is None else Tracer(endpoint),
    )
