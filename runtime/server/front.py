"""What every request passes before its route: its path, its id, cross-origin rules, its API key, the log."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from castiron.errors import EngineError, RequestError

from .api_keys import ApiKeys
from .errors import ApiError
from .page import PAGE_PATHS
from .request_context import KEY_USE, RequestContext, current, request_id
from .streaming import IS_CLOSED
from .tracing import Tracer

_log = logging.getLogger("castiron.access")
#: Open without a key, and each by its whole path: a prefix would open what comes below it one day.
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready"}) | PAGE_PATHS
#: Asked for every few seconds by machines; logged for --log-level debug alone.
_PROBES = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/stats"})
#: Methods that change and compute nothing.
_READING = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class CrossOrigin:
    """Which web pages of other origins may call the server (CORS); none without ``origins``."""

    origins: Sequence[str] = ()
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    credentials: bool = False

    def check(self) -> None:
        """Raise EngineError for what would open the server to every page with its visitor's cookies, or do
        nothing.
        """
        given = {
            "--allow-credentials": self.credentials,
            "--allowed-methods": list(self.methods) != ["*"],
            "--allowed-headers": list(self.headers) != ["*"],
        }
        for option, there in given.items():
            if there and not self.origins:
                raise EngineError(f"{option} needs --allowed-origins, the pages that it is for")
        if self.credentials and "*" in self.origins:
            raise EngineError(
                "--allow-credentials with the origin * would let every web page act as its visitor; name the "
                "origins by --allowed-origins"
            )


@dataclass(frozen=True)
class FrontConfig:
    """How requests are let in.

    Attributes:
        keys: one of them opens everything but ``PUBLIC_PATHS``; none = all is open.
        root_path: prefix of all paths, for a proxy that serves more than this server; it may strip it or not.
        access_log: log a line for each request.
        tracer: makes a span of each request but probes.
    """

    keys: ApiKeys = field(default_factory=lambda: ApiKeys(()))
    cross_origin: CrossOrigin = CrossOrigin()
    root_path: str = ""
    access_log: bool = False
    tracer: Tracer | None = None

    @property
    def prefix(self) -> str:
        """``root_path`` with a slash before it and none after, or nothing."""
        inner = self.root_path.strip("/")
        return f"/{inner}" if inner else ""


class Front:
    """The outermost application. ``active`` counts the requests that are being worked for.

    Args:
        app: has the routes.
        refuse: the answer to a request, by its path, that no route gets to see for an error.
        routes: methods and paths, for people.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: FrontConfig,
        refuse: Callable[[str, Exception], Response],
        routes: Sequence[str] = (),
    ) -> None:
        config.cross_origin.check()
        self.routes = routes
        self._root = config.prefix
        self._access_log = config.access_log
        self._tracer = config.tracer
        inner: ASGIApp = _KeyGate(app, config.keys, refuse) if config.keys else app
        rules = config.cross_origin
        if rules.origins:
            inner = CORSMiddleware(
                inner,
                allow_origins=list(rules.origins),
                allow_methods=list(rules.methods),
                allow_headers=list(rules.headers),
                allow_credentials=rules.credentials,
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        self._app = inner
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = self._placed(scope)
        headers = Headers(scope=scope)
        context = RequestContext(request_id(headers.get("x-request-id")), scope.get(KEY_USE))
        path = _route_path(scope)
        if self._tracer is not None and path not in _PROBES:
            context.trace = self._tracer.begin(scope["method"], path, headers, context.id)
        token = current.set(context)
        counted = scope["method"] not in _READING
        self.active += counted
        status = 0
        is_closed = scope.get("extensions", {}).get(IS_CLOSED, bool)

        async def sending(message: Message) -> None:
            if is_closed():  # the transport would take it for an error
                return
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = context.id
            await send(message)

        # The protocol sends no body for it; where there is a GET, there is a HEAD.
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            await self._app(asked, receive, sending)
        finally:
            self.active -= counted
            current.reset(token)
            for end in context.at_end:
                end()
            # A client that went before anything was sent: nginx's number for that.
            status = status or 499
            if context.trace is not None:
                context.trace.end(status, context.prompt_tokens, context.completion_tokens)
            if self._access_log:
                _log_request(scope, path, context, status)

    def _placed(self, scope: Scope) -> Scope:
        """The scope with one slash where clients that join base URLs carelessly have more, and with the root
        path in front whether a proxy left it there or not.
        """
        path = scope["path"]
        if "//" in path:
            path = re.sub("/{2,}", "/", path)
        if self._root and path != self._root and not path.startswith(self._root + "/"):
            path = self._root + path
        if path == scope["path"] and not self._root:
            return scope
        return {**scope, "path": path, "raw_path": path.encode(), "root_path": self._root}


class _KeyGate:
    """Lets requests with a key of the server pass, as many at once as the key may have."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, refuse: Callable[[str, Exception], Response]) -> None:
        self._app = app
        self._keys = keys
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _route_path(scope) in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        working = scope["method"] not in _READING
        try:
            key = self._keys.find(Headers(scope=scope))
            if working:
                key.begin()
        except (ApiError, RequestError) as error:
            await self._refuse(_route_path(scope), error)(scope, receive, send)
            return
        context = current.get()
        if context is not None:
            context.key = key
        try:
            await self._app(scope, receive, send)
        finally:
            if working:
                key.end()


def _route_path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _log_request(scope: Scope, path: str, context: RequestContext, status: int) -> None:
    level = logging.DEBUG if path in _PROBES else logging.INFO
    if not _log.isEnabledFor(level):
        return
    fields: dict[str, object] = {
        "request_id": context.id,
        "client": ":".join(map(str, scope["client"] or ())),
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(time.perf_counter() - context.began, 4),
    }
    if context.key is not None:
        fields["api_key"] = context.key.name
    if context.prompt_tokens:
        fields |= {"prompt_tokens": context.prompt_tokens, "completion_tokens": context.completion_tokens}
    if context.first_token is not None:
        fields["ttft_seconds"] = round(context.first_token, 4)
    _log.log(level, "request", extra={"fields": fields})
