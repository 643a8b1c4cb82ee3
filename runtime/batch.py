"""The prompts of one ``generate`` call, submitted together; a bad one does not stop the others."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from castiron.errors import RequestError

from .outputs import CompletionOutput, RequestOutput, Update, joined
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .request import Request, Sink
    from .session import Session

#: (place of the prompt, which of its outputs)
_Key = tuple[int, int]


class Batch:
    """Submits once, by ``run`` or by ``stream``.

    Args:
        session: the engine.
        prompts: token ids of each prompt, or None where ``texts`` has a text.
        texts: text of each prompt, or None where ``prompts`` has ids.
        params: how to decode, for all of them.
        default_max_tokens: for params that leave ``max_tokens`` open; None = as many as fit.
    """

    def __init__(
        self,
        session: Session,
        prompts: Sequence[Any],
        texts: Sequence[str | None],
        params: SamplingParams,
        default_max_tokens: int | None = None,
    ) -> None:
        self._session = session
        self._prompts = prompts
        self._texts = texts
        self._params = params
        self._default_max_tokens = default_max_tokens
        self._running: dict[_Key, Request] = {}
        self._results: list[RequestOutput] = []

    def run(self) -> list[RequestOutput]:
        """Wait for all outputs."""
        updates: dict[_Key, list[Update]] = {}
        finished: queue.SimpleQueue[_Key] = queue.SimpleQueue()

        def make_sink(key: _Key) -> Sink:
            mine = updates[key] = []

            def sink(update: Update) -> None:
                # Gathered on the session's thread: this one wakes up once for each output, not for each
                # token.
                mine.append(update)
                if update.finish_reason is not None:
                    finished.put(key)

            return sink

        try:
            self._submit_all(make_sink)
            while self._running:
                key = finished.get()
                if self._running.pop(key, None) is not None:
                    i, k = key
                    self._results[i] = self._results[i].extended(k, joined(updates[key]))
        finally:
            self._cancel_rest()
        return self._results

    def stream(self) -> Iterator[RequestOutput]:
        """Give a prompt's result whenever it has grown; leaving the iterator early cancels the rest."""
        updates: queue.SimpleQueue[tuple[_Key, Update]] = queue.SimpleQueue()

        def make_sink(key: _Key) -> Sink:
            return lambda update: updates.put((key, update))

        try:
            self._submit_all(make_sink)
            yield from [result for result in self._results if result.error is not None]
            while self._running:
                key, update = updates.get()
                if key not in self._running:
                    continue
                if update.finish_reason is not None:
                    del self._running[key]
                i, k = key
                self._results[i] = self._results[i].extended(k, update)
                yield self._results[i]
        finally:
            self._cancel_rest()

    def _submit_all(self, make_sink: Callable[[_Key], Sink]) -> None:
        for i, (prompt, text) in enumerate(zip(self._prompts, self._texts, strict=True)):
            self._results.append(self._submit(i, prompt, text, make_sink))

    def _submit(
        self, i: int, prompt: Any, text: str | None, make_sink: Callable[[_Key], Sink]
    ) -> RequestOutput:
        params = self._params
        outputs = [
            CompletionOutput(k, logprobs=None if params.logprobs is None else []) for k in range(params.n)
        ]
        ids: list[int] = []
        try:
            if text is not None:
                prompt = self._session.need_tokenizer().encode(text)
            ids, checked = self._session.check(prompt, params, self._default_max_tokens)
            for k in range(params.n):
                self._running[i, k] = self._session.submit(ids, checked.for_output(k), make_sink((i, k)))
        except RequestError as e:
            self._cancel_rest(of_prompt=i)
            failed = [replace(output, finish_reason="error") for output in outputs]
            return RequestOutput(i, ids, failed, text, error=str(e))
        return RequestOutput(i, ids, outputs, text)

    def _cancel_rest(self, of_prompt: int | None = None) -> None:
        for key in [key for key in self._running if of_prompt in (None, key[0])]:
            self._session.cancel(self._running.pop(key))
