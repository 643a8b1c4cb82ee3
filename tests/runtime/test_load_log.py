"""The line every ten seconds while there is work."""

from __future__ import annotations

import asyncio
import logging

from castiron.runtime.async_engine import AsyncEngine
from castiron.runtime.server.load_log import LoadLog, log_load
from castiron.runtime.server.service import ServerConfig, Service
from fake_core import make_session


def stats(prompt=0, generated=0, queried=0, cached=0, running=0, waiting=0, used=0):
    return {
        "prompt_tokens": prompt,
        "generated_tokens": generated,
        "prefix_query_tokens": queried,
        "prefix_cached_tokens": cached,
        "running": running,
        "waiting": waiting,
        "kv_blocks_used": used,
        "kv_blocks_total": 200,
    }


def test_rates_are_of_the_time_since_the_last_line():
    log = LoadLog(100.0, stats(prompt=1000, generated=500))
    fields = log.fields(110.0, stats(3000, 1500, queried=400, cached=100, running=3, waiting=2, used=50))
    assert fields == {
        "prompt_tokens_per_s": 200.0,
        "generation_tokens_per_s": 100.0,
        "running": 3,
        "waiting": 2,
        "kv_cache_percent": 25.0,
        "prefix_hit_percent": 25.0,
    }
    fields = log.fields(115.0, stats(3000, 1550, queried=400, cached=100, running=1))
    assert (fields["prompt_tokens_per_s"], fields["generation_tokens_per_s"]) == (0.0, 10.0)
    assert "prefix_hit_percent" not in fields


def test_an_idle_engine_has_no_line_and_one_that_only_waits_has():
    log = LoadLog(0.0, stats(generated=5))
    assert log.fields(10.0, stats(generated=5)) is None
    assert log.fields(20.0, stats(generated=5, waiting=1)) is not None
    assert log.fields(30.0, stats(generated=6)) is not None
    assert log.fields(40.0, stats(generated=6)) is None


def test_the_server_logs_what_its_engine_does(caplog):
    async def run():
        session = make_session()
        counted = [stats(), stats(generated=50, running=1), *[stats(generated=50)] * 5]
        seen = asyncio.Event()

        def next_stats(recent_steps=0):
            if len(counted) == 1:
                seen.set()
                return counted[0]
            return counted.pop(0)

        session.core.stats = next_stats
        service = Service(AsyncEngine(session), ServerConfig(("fake",)))
        task = asyncio.create_task(log_load(service, seconds=0.02))
        await seen.wait()
        task.cancel()
        await service.close()

    with caplog.at_level(logging.INFO, logger="castiron.load"):
        asyncio.run(run())
    (line,) = [r for r in caplog.records if r.name == "castiron.load"]
    assert line.fields["running"] == 1
    assert line.fields["generation_tokens_per_s"] > 0
