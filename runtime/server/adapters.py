"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

import asyncio

from pydantic import StrictStr
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ..lora import Adapters
from ..request_errors import AdapterNotFoundError
from .body import parse
from .errors import ApiError
from .protocol import Body
from .service import Service


class LoadBody(Body):
    """Which adapter, from which folder of the server."""

    lora_name: StrictStr
    lora_path: StrictStr


class UnloadBody(Body):
    """Which adapter."""

    lora_name: StrictStr


async def load_adapter(service: Service, request: Request) -> Response:
    """Load an adapter; 400 with the reason where it cannot be used."""
    adapters = _adapters(service)
    body = await parse(service, request, LoadBody)
    if body.lora_name in service.config.model_names:
        raise ApiError(400, f"{body.lora_name[:200]!r} is the name of the model itself", "lora_name")
    # Not by off_loop: files may be slow, and prompts wait for its few threads.
    await asyncio.to_thread(adapters.load, body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(service: Service, request: Request) -> Response:
    """Forget an adapter; requests that use it go on. 404 where there is none of the name."""
    adapters = _adapters(service)
    body = await parse(service, request, UnloadBody)
    try:
        adapters.unload(body.lora_name)
    except AdapterNotFoundError as e:
        raise ApiError(404, str(e), "lora_name") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _adapters(service: Service) -> Adapters:
    if not service.config.lora_updating:
        raise ApiError(
            403, "adapters may not be changed here; start the server with --allow-runtime-lora-updating"
        )
    return service.engine.session.need_adapters()
