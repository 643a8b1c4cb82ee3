"""The running outputs of one HTTP request, merged into one stream of updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from castiron.errors import EngineError, RequestError

from ..outputs import Update
from ..prompt_outputs import PromptOutputs
from ..request import Request
from ..sampling_params import SamplingParams
from .prompt_log import log_prompts
from .request_context import current
from .service import Service
from .streaming import WriteNow
from .tracing import OutputTimes


@dataclass(slots=True)
class Choice:
    """One output.

    Attributes:
        index: counts over prompts and their n outputs.
        request: of the engine; of several outputs that it finds, or that are the best of more, one of theirs.
    """

    index: int
    prompt_ids: list[int]
    request: Request | None = None
    tokens: int = 0
    first_token: float | None = None
    cached_tokens: int = 0
    finished: bool = False


class Generation:
    """Submits every output at once; leave it by ``close`` in any case.

    Args:
        service: the engine and its metrics.
        prompts: token ids of each prompt.
        params: ``n`` outputs are made of each prompt.

    Raises:
        RequestError: one of the prompts cannot be served; none of them runs then.
    """

    def __init__(
        self,
        service: Service,
        prompts: Sequence[list[int]],
        params: SamplingParams,
    ) -> None:
        self._service = service
        self.lora = params.lora
        self._queue: asyncio.Queue[tuple[Choice, Update]] = asyncio.Queue()
        self._write_now: WriteNow | None = None
        self._makers: Sequence[Callable[[str], bytes]] = ()
        #: Whether the task that reads ``batches`` has read all there was.
        self._reader_waits = False
        self._began = time.perf_counter()
        self.choices: list[Choice] = []
        self._requests: list[Request] = []
        session = service.engine.session
        checked = [session.check(ids, params) for ids in prompts]
        self._context = current.get()
        self._held_tokens = self._hold_tokens(checked)
        self._release_engine: Callable[[], None] | None = service.hold_engine()
        try:
            for ids, resolved in checked:
                self._start(ids, resolved)
        except BaseException:
            self.close()
            raise
        self._left = len(self.choices)
        if service.config.log_prompts:
            log_prompts(service, prompts, params)

    def _start(self, ids: list[int], params: SamplingParams) -> None:
        choices = [Choice(len(self.choices) + k, ids) for k in range(params.n)]
        made = PromptOutputs(params, lambda k, update: self._put(choices[k], update))
        first = len(self._requests)
        for j, part in enumerate(made.requests):
            self._requests.append(self._service.engine.start(ids, part, partial(made.take, j)))
        for k, choice in enumerate(choices):
            choice.request = self._requests[min(first + k, len(self._requests) - 1)]
        self.choices += choices

    def shorten(self, write_now: WriteNow, makers: Sequence[Callable[[str], bytes]]) -> None:
        """Send updates that only add text as they come, on the event loop, without waking the task that reads
        ``batches``: with many streams that is most of what a token costs.

        The first and the last update of an output never go this way, nor any while the task has some to read,
        nor those that ``write_now`` does not take.

        Args:
            makers: for each choice, what makes the event of a text.
        """
        self._write_now, self._makers = write_now, makers

    def _put(self, choice: Choice, update: Update) -> None:
        if (
            self._reader_waits
            and self._write_now is not None
            and update.finish_reason is None
            and choice.first_token is not None
            and (not update.text or self._write_now(self._makers[choice.index](update.text)))
        ):
            choice.tokens += len(update.token_ids)
            return
        self._reader_waits = False
        self._queue.put_nowait((choice, update))

    def _hold_tokens(self, checked: Sequence[tuple[list[int], SamplingParams]]) -> int:
        """Count what the outputs may take against the client's API key."""
        context = self._context
        if context is None:
            return 0
        context.prompt_tokens += sum(len(ids) for ids, _ in checked)
        tokens = sum((len(ids) + (each.max_tokens or 0)) * each.num_requests for ids, each in checked)
        if context.key is not None:
            context.key.hold(tokens)
        return tokens

    async def batches(self) -> AsyncIterator[list[tuple[Choice, Update]]]:
        """Updates as they come, all that wait at once, until every output is finished.

        Raises:
            RequestError: an output ended with an error.
            EngineError: the engine has failed.
        """
        while self._left:
            self._reader_waits = self._queue.empty()
            batch = [await self._queue.get()]
            self._reader_waits = False
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            for choice, update in batch:
                self._account(choice, update)
                if update.finish_reason == "error":
                    kind = RequestError if self._service.engine.session.failure is None else EngineError
                    raise kind(update.error or "the engine gave up on this request")
            yield batch

    async def all(self) -> list[list[Update]]:
        """All updates of each choice."""
        found: list[list[Update]] = [[] for _ in self.choices]
        async for batch in self.batches():
            for choice, update in batch:
                found[choice.index].append(update)
        return found

    def close(self) -> None:
        """Free what still runs in the engine; the client is gone or has all it wants."""
        for request in self._requests:
            self._service.engine.session.cancel(request)
        if self._context is not None and self._context.key is not None:
            self._context.key.release(self._held_tokens)
            self._held_tokens = 0
        if self._release_engine is not None:
            self._release_engine()
            self._release_engine = None
        for choice in self.choices:
            if not choice.finished:
                self._finish(choice, "cancelled")

    def usage(self, n: int) -> dict[str, object]:
        """OpenAI's usage object; a prompt counts once, however many outputs it has."""
        prompt = sum(len(c.prompt_ids) for c in self.choices[::n])
        completion = sum(c.tokens for c in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in self.choices[::n])},
        }

    def _account(self, choice: Choice, update: Update) -> None:
        now = time.perf_counter()
        metrics = self._service.metrics
        if update.token_ids and choice.first_token is None:
            choice.first_token = now
            metrics.first_token(now - self._began)
            if self._context is not None and self._context.first_token is None:
                self._context.first_token = now - self._context.began
        choice.tokens += len(update.token_ids)
        choice.cached_tokens = max(choice.cached_tokens, update.cached_tokens)
        if update.finish_reason is not None:
            self._left -= 1
            self._finish(choice, update.finish_reason)

    def _finish(self, choice: Choice, reason: str) -> None:
        choice.finished = True
        waited = None if choice.request is None else choice.request.queue_seconds
        times = OutputTimes(
            choice.index,
            self._began,
            None if waited is None else self._began + waited,
            choice.first_token,
            time.perf_counter(),
            choice.tokens,
            reason,
        )
        self._service.metrics.finished(times, len(choice.prompt_ids), choice.cached_tokens)
        if self._context is not None:
            self._context.completion_tokens += choice.tokens
            if self._context.trace is not None:
                self._context.trace.output(times)
