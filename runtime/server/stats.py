"""GET /stats: the engine's counters and gauges, and the records of its last steps."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import castiron

from ...engines.program import BLOCK_TOKENS
from ..request_errors import ParameterError
from .service import Service

#: As many as the core keeps.
_MOST_STEPS = 1024


async def get_stats(service: Service, request: Request) -> Response:
    """Answer with ``core.stats()`` and what else describes the server.

    Query: ``recent_steps`` (0 to 1,024, default 0) records of the last steps at most; ``after_step``: those
    after this one alone, so that who asks again and again gets each step once.

    Raises:
        ParameterError: a query that is no number, or out of range.
    """
    wanted = _number(request, "recent_steps", _MOST_STEPS)
    after = _number(request, "after_step", 1 << 62)
    stats = await service.stats(wanted)
    steps = stats.pop("recent_steps", [])
    if after <= stats.get("steps", 0):  # else it counted the steps of an engine before this one
        steps = [step for step in steps if step["step"] > after]
    session = service.engine.session
    info = session.info
    about: dict[str, Any] = {
        "model": service.model,
        "version": castiron.__version__,
        "device": None if info.device is None else str(info.device),
        "draining": service.draining,
        "uptime_s": round(time.time() - service.created, 1),
        "seconds_since_progress": round(session.seconds_since_progress, 3),
        "kv_block_tokens": BLOCK_TOKENS,
        "kernels": dict(info.kernels),
    }
    return JSONResponse({**about, **stats, "recent_steps": steps})


def _number(request: Request, name: str, most: int) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise ParameterError(f"{name} is {text[:40]!r}; expected a whole number from 0 to {most}", name)
    return int(text)
