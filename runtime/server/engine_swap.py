"""POST /v1/engine/swap: serve another engine without dropping a request."""

from __future__ import annotations

import logging
import time
from typing import Annotated

from pydantic import Field, StrictStr
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from castiron.errors import CastironError, EngineError

from .body import parse
from .errors import ApiError
from .protocol import Body
from .served_engine import ExchangeRunningError, ServedEngine
from .service import Service

_log = logging.getLogger("castiron.server")


class SwapBody(Body):
    """Which engine, from which folder of the server."""

    engine: Annotated[StrictStr, Field(min_length=1)]


async def swap_engine(service: Service, request: Request) -> Response:
    """Load the engine and serve it in place of the one before, under the same model names.

    Requests that have begun finish on the old engine, which is freed then; both are in memory until that.
    """
    if service.load_engine is None:
        raise ApiError(403, "the engine may not be exchanged here; start the server with --allow-engine-swap")
    body = await parse(service, request, SwapBody)
    load = service.load_engine
    serving = service.slot.current.engine.session
    before = serving.info.name

    def replacement() -> ServedEngine:
        session = load(body.engine)
        if serving.tokenizer is not None and session.tokenizer is None:
            session.close()
            raise EngineError(
                f"engine {session.info.name!r} has no tokenizer and the one that is served has: every client "
                "that sends text would be refused. Build it from a folder with its tokenizer"
            )
        return service.as_served(session)

    began = time.perf_counter()
    try:
        made = await service.slot.exchange(replacement)
    except ExchangeRunningError as e:
        raise ApiError(409, str(e)) from None
    except CastironError as e:  # of the engine, or of an adapter of --lora-modules
        raise ApiError(400, str(e), "engine") from None
    service.exchanged_for = body.engine
    answer = {
        "engine": made.engine.session.info.name,
        "before": before,
        "max_model_len": made.engine.session.info.max_seq_len,
        "seconds": round(time.perf_counter() - began, 3),
    }
    _log.info("another engine is served", extra={"fields": answer})
    return JSONResponse(answer)
