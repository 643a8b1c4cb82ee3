"""AsyncEngine over the fake core."""

from __future__ import annotations

import asyncio

import make_tokenizer
import pytest
from castiron.runtime.async_engine import AsyncEngine
from castiron.runtime.request_errors import QueueFullError
from castiron.runtime.sampling_params import SamplingParams
from fake_core import FakeCore, greedy, make_session

from castiron.errors import RequestError


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_many_requests_at_once_get_what_each_gets_alone():
    async def one(engine, prompt):
        async for result in engine.generate(prompt, SamplingParams(max_tokens=12)):
            last = result
        return last.outputs[0].token_ids

    async def main():
        async with AsyncEngine(make_session()) as engine:
            return await asyncio.gather(*(one(engine, [i + 1, 2]) for i in range(20)))

    assert run(main()) == [greedy([i + 1, 2], 12) for i in range(20)]


def test_cancelling_the_task_frees_the_request():
    async def main():
        core = FakeCore()
        async with AsyncEngine(make_session(core)) as engine:

            async def consume():
                async for _ in engine.generate([1], SamplingParams(max_tokens=200)):
                    pass

            with core.held():
                task = asyncio.create_task(consume())
                while engine.session.unfinished == 0:
                    await asyncio.sleep(0.002)
                task.cancel()
                while not core.cancelled:
                    await asyncio.sleep(0.002)
            while engine.session.unfinished > 0:
                await asyncio.sleep(0.002)

    run(main())


def test_a_full_queue_is_refused_and_recovers():
    async def main():
        core = FakeCore(max_batch_size=2)
        async with AsyncEngine(make_session(core, max_queue_size=1)) as engine:
            params = SamplingParams(max_tokens=50)
            with core.held():
                streams = [engine.submit([1], params) for _ in range(3)]
                with pytest.raises(QueueFullError):
                    engine.submit([1], params)
            for stream in streams:
                async for _ in stream:
                    pass
            async for _ in engine.submit([1], params):
                pass

    run(main())


def test_text_prompts_are_tokenized_off_the_loop(tmp_path):
    async def main():
        folder = make_tokenizer.byte_level(tmp_path)
        async with AsyncEngine(make_session(tokenizer_dir=folder)) as engine:
            return [r async for r in engine.generate("Hello", SamplingParams(max_tokens=3))][-1]

    result = run(main())
    assert result.prompt == "Hello"
    assert len(result.outputs[0].token_ids) == 3


def test_a_bad_request_raises_in_the_caller():
    async def main():
        async with AsyncEngine(make_session()) as engine:
            async for _ in engine.generate([5000]):
                pass

    with pytest.raises(RequestError, match="5000"):
        run(main())
