"""AsyncEngine: the same session for asyncio; what the server is built on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from castiron.errors import RequestError

from .loading import open_session
from .options import RuntimeOptions
from .outputs import CompletionOutput, RequestOutput, Update
from .prompt_outputs import PromptOutputs
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .lora import AdapterUse
    from .request import Request, Sink
    from .session import Session


class AsyncEngine:
    """Runs requests for coroutines of one event loop. Close it, or use ``async with``.

    Args:
        session: a loaded engine; ``AsyncEngine.from_dir`` makes one.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._mailbox = _Mailbox()
        session.on_batch(self._mailbox.deliver)

    @classmethod
    def from_dir(cls, engine_dir: str | os.PathLike[str], rank: int = 0, **options: Any) -> AsyncEngine:
        """Load an engine; ``options`` are the fields of ``RuntimeOptions`` (see ``ModelRunner.from_dir``)."""
        return cls(open_session(engine_dir, rank, RuntimeOptions(**options)))

    def start(self, prompt_ids: Any, params: SamplingParams, put: Callable[[Update], None]) -> Request:
        """Queue one output of a prompt; to be called on the event loop.

        Args:
            prompt_ids: token ids.
            params: of one request: see ``PromptOutputs``. With a grammar or an adapter, call it within
                ``prepared``.
            put: called on the loop with each update.

        Raises:
            RequestError: the request is wrong, or the queue is full (QueueFullError).
            EngineError: the engine has failed or is closed.
        """
        return self.session.submit(prompt_ids, params, self._mailbox.sink(put))

    @asynccontextmanager
    async def prepared(self, params: SamplingParams) -> AsyncIterator[None]:
        """Compile the grammar and read the adapter on a thread; within the context ``start`` finds both in
        memory and takes no time on the loop.

        Raises:
            RequestError: the grammar is wrong, or the adapter unknown or unusable.
        """
        if params.structured_output is None and params.lora is None:
            yield
            return
        ready = asyncio.ensure_future(asyncio.to_thread(self.session.prepare, params))
        try:
            await asyncio.shield(ready)  # who is cancelled meanwhile must still give the adapter back
            yield
        finally:
            ready.add_done_callback(self._give_back)

    def _give_back(self, ready: asyncio.Future[AdapterUse | None]) -> None:
        if ready.cancelled() or ready.exception() is not None:
            return
        adapter = ready.result()
        if adapter is not None:
            self.session.need_adapters().release(adapter)

    def submit(self, prompt_ids: Any, params: SamplingParams) -> Stream:
        """``start`` with the updates as an async iterator."""
        stream = Stream(self.session)
        stream.requests.append(self.start(prompt_ids, params, stream.put))
        return stream

    async def generate(
        self, prompt: str | Any, params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Partial results of one prompt, a text or token ids, each the whole so far.

        Leaving the iteration, or cancelling the task, ends the request in the engine.

        Raises:
            RequestError: the request cannot be served, or ended with an error.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(
                f"n is {params.n}; AsyncEngine.generate makes one output, so call it {params.n} times"
            )
        text = prompt if isinstance(prompt, str) else None
        if text is not None:
            tokenizer = await asyncio.to_thread(self.session.need_tokenizer)
            prompt = await asyncio.to_thread(tokenizer.encode, text)
        stream = Stream(self.session)
        made = PromptOutputs(params, lambda _, update: stream.put(update))
        try:
            async with self.prepared(params):
                for j, part in enumerate(made.requests):
                    stream.requests.append(self.start(prompt, part, partial(made.take, j)))
        except BaseException:
            stream.cancel()
            raise
        empty = CompletionOutput(0, logprobs=None if params.logprobs is None else [])
        result = RequestOutput(0, stream.requests[0].prompt_ids, [empty], text)
        try:
            async for update in stream:
                result = result.extended(0, update)
                if result.error is not None:
                    raise RequestError(result.error)
                yield result
        finally:
            stream.cancel()

    async def close(self) -> None:
        """Stop the engine; requests that still run end with an error."""
        await asyncio.to_thread(self.session.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Stream:
    """The updates of one output, as an async iterator that ends after the last one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queue: asyncio.Queue[Update] = asyncio.Queue()
        self._ended = False
        self.requests: list[Request] = []

    def put(self, update: Update) -> None:
        """Add an update; on the event loop only."""
        self._queue.put_nowait(update)

    def cancel(self) -> None:
        """End what still runs in the engine."""
        for request in self.requests:
            self._session.cancel(request)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Update:
        if self._ended:
            raise StopAsyncIteration
        update = await self._queue.get()
        self._ended = update.finish_reason is not None
        return update


class _Mailbox:
    """Carries the updates of one poll to the event loop in one call, instead of one call for each token."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[Update], None], Update]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def sink(self, put: Callable[[Update], None]) -> Sink:
        """A sink that hands updates to ``put`` on the loop that is running now."""
        self._loop = asyncio.get_running_loop()
        return lambda update: self._waiting.append((put, update))

    def deliver(self) -> None:
        """Send what has gathered; on the session's thread."""
        if not self._waiting or self._loop is None:
            return
        batch, self._waiting = self._waiting, []
        # A loop that was closed while requests ran has nobody left to read them.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_put_all, batch)


def _put_all(batch: list[tuple[Callable[[Update], None], Update]]) -> None:
    for put, update in batch:
        put(update)
