"""What has to be known of a server before it is measured."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping

import aiohttp

from castiron.errors import RequestError


async def first_model(base_url: str, headers: Mapping[str, str], wait_seconds: float) -> str:
    """The first name of ``/v1/models``.

    Raises:
        RequestError: the server did not answer in time, or names no model.
    """
    url = base_url.rstrip("/") + "/v1/models"
    status, text = await wait_for_answer(url, headers, wait_seconds)
    if status != 200:
        raise RequestError(f"{url} answers with HTTP {status}: {text[:200]}; name the model by --model")
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise RequestError(f"{url} lists no model; name one by --model") from None


async def wait_for_answer(url: str, headers: Mapping[str, str], wait_seconds: float) -> tuple[int, str]:
    """GET until somebody answers: the status and the body.

    Raises:
        RequestError: nobody did in ``wait_seconds``.
    """
    deadline = time.monotonic() + wait_seconds
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        while True:
            try:
                async with session.get(url) as answer:
                    return answer.status, await answer.text(errors="replace")
            except aiohttp.InvalidURL:
                raise RequestError(f"{url!r} is no address; expected --base-url http://HOST:PORT") from None
            except (aiohttp.ClientError, OSError, TimeoutError, asyncio.TimeoutError) as error:
                if time.monotonic() >= deadline:
                    raise RequestError(
                        f"no server answers at {url} ({type(error).__name__}: {error}); start it, or change "
                        "--base-url"
                    ) from None
            await asyncio.sleep(0.25)
