"""What is known about the HTTP request that the current task answers."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api_keys import KeyUse
    from .served_engine import ServedEngine
    from .tracing import Trace

#: What an id from outside may look like: it goes into logs and into a header of the answer.
_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

#: Item of a request's scope: the API key's use, where another process has let the request pass with it.
KEY_USE = "castiron.key_use"


@dataclass(slots=True)
class RequestContext:
    """One HTTP request.

    Attributes:
        id: of the client's X-Request-Id, or made here.
        key: the API key's use; None where the server has no keys.
        began: seconds of ``time.perf_counter``.
        body_bytes: of its body, once read.
        prompt_tokens, completion_tokens: of all its outputs so far.
        first_token: seconds from ``began`` to the first token.
        served: the engine that it runs on, from its first use to its end.
        trace: its span, where the server traces.
        at_end: called when it is answered.
    """

    id: str
    key: KeyUse | None = None
    began: float = field(default_factory=time.perf_counter)
    body_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None
    served: ServedEngine | None = None
    trace: Trace | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)


#: Of the task that answers; a task that answers nobody (a test of a part) has none.
current: ContextVar[RequestContext | None] = ContextVar("castiron_request", default=None)


def request_id(given: str | None) -> str:
    """The client's id where it can be logged as it is, else a new one."""
    return given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex
