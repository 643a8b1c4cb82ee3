"""One line in the log every ten seconds while there is work; none while there is not."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .service import Service

_log = logging.getLogger("castiron.load")
_SECONDS = 10.0
_COUNTED = ("prompt_tokens", "generated_tokens", "prefix_query_tokens", "prefix_cached_tokens")


class LoadLog:
    """Turns the engine's counters into rates.

    Args:
        now: seconds of a monotonic clock, and the counters at that time, which rates begin from.
    """

    def __init__(self, now: float, stats: dict[str, Any]) -> None:
        self._before = now, stats

    def fields(self, now: float, stats: dict[str, Any]) -> dict[str, Any] | None:
        """What to log, or None when nothing has happened since the last time and nothing waits."""
        then, old = self._before
        self._before = now, stats
        added = {name: stats.get(name, 0) - old.get(name, 0) for name in _COUNTED}
        running, waiting = stats.get("running", 0), stats.get("waiting", 0)
        if not (running or waiting or any(added.values())):
            return None
        seconds = max(now - then, 1e-9)
        total = stats.get("kv_blocks_total", 0)
        found: dict[str, Any] = {
            "prompt_tokens_per_s": round(added["prompt_tokens"] / seconds, 1),
            "generation_tokens_per_s": round(added["generated_tokens"] / seconds, 1),
            "running": running,
            "waiting": waiting,
            "kv_cache_percent": round(100 * stats.get("kv_blocks_used", 0) / total, 1) if total else 0.0,
        }
        if queried := added["prefix_query_tokens"]:
            found["prefix_hit_percent"] = round(100 * added["prefix_cached_tokens"] / queried, 1)
        return found


async def log_load(service: Service, seconds: float = _SECONDS) -> None:
    """Log until cancelled."""
    log = LoadLog(time.monotonic(), await service.stats())
    while True:
        await asyncio.sleep(seconds)
        fields = log.fields(time.monotonic(), await service.stats())
        if fields is not None:
            _log.info("load", extra={"fields": fields})
