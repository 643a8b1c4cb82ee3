"""The prompts of one ``generate`` call, submitted together; a bad one does not stop the others."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from castiron.errors import RequestError

from .outputs import CompletionOutput, RequestOutput, Update, joined
from .prompt_outputs import PromptOutputs
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .request import Request
    from .session import Session

#: (place of the prompt, which of its outputs)
_Key = tuple[int, int]


class Batch:
    """Submits once, by ``run`` or by ``stream``.

    Args:
        session: the engine.
        prompts: token ids of each prompt, or None where ``texts`` has a text.
        texts: text of each prompt, or None where ``prompts`` has ids.
        params: how to decode each of them.
        default_max_tokens: for params that leave ``max_tokens`` open; None = as many as fit.
    """

    def __init__(
        self,
        session: Session,
        prompts: Sequence[Any],
        texts: Sequence[str | None],
        params: Sequence[SamplingParams],
        default_max_tokens: int | None = None,
    ) -> None:
        self._session = session
        self._prompts = prompts
        self._texts = texts
        self._params = params
        self._default_max_tokens = default_max_tokens
        self._requests: list[Request] = []
        self._running: set[_Key] = set()
        self._results: list[RequestOutput] = []

    def run(self) -> list[RequestOutput]:
        """Wait for all outputs."""
        updates: dict[_Key, list[Update]] = {}
        finished: queue.SimpleQueue[_Key] = queue.SimpleQueue()

        def put(key: _Key, update: Update) -> None:
            # Gathered on the session's thread: this one wakes up once for each output, not for each token.
            updates.setdefault(key, []).append(update)
            if update.finish_reason is not None:
                finished.put(key)

        try:
            self._submit_all(put)
            while self._running:
                key = finished.get()
                if key in self._running:
                    self._running.remove(key)
                    i, k = key
                    self._results[i] = self._results[i].extended(k, joined(updates[key]))
        finally:
            self._cancel(self._requests)
        return self._results

    def stream(self) -> Iterator[RequestOutput]:
        """Give a prompt's result whenever it has grown; leaving the iterator early cancels the rest."""
        updates: queue.SimpleQueue[tuple[_Key, Update]] = queue.SimpleQueue()

        def put(key: _Key, update: Update) -> None:
            updates.put((key, update))

        try:
            self._submit_all(put)
            yield from [result for result in self._results if result.error is not None]
            while self._running:
                key, update = updates.get()
                if key not in self._running:
                    continue
                if update.finish_reason is not None:
                    self._running.remove(key)
                i, k = key
                self._results[i] = self._results[i].extended(k, update)
                yield self._results[i]
        finally:
            self._cancel(self._requests)

    def _submit_all(self, put: Callable[[_Key, Update], None]) -> None:
        for i, (prompt, text) in enumerate(zip(self._prompts, self._texts, strict=True)):
            self._results.append(self._submit(i, prompt, text, put))

    def _submit(
        self, i: int, prompt: Any, text: str | None, put: Callable[[_Key, Update], None]
    ) -> RequestOutput:
        params = self._params[i]
        outputs = [
            CompletionOutput(k, logprobs=None if params.logprobs is None else []) for k in range(params.n)
        ]
        ids: list[int] = []
        begun: list[Request] = []
        try:
            if text is not None:
                prompt = self._session.need_tokenizer().encode(text)
            ids, checked = self._session.check(prompt, params, self._default_max_tokens)
            made = PromptOutputs(checked, lambda k, update: put((i, k), update))
            for j, part in enumerate(made.requests):
                begun.append(self._session.submit(ids, part, partial(made.take, j)))
        except RequestError as e:
            self._cancel(begun)
            failed = [replace(output, finish_reason="error") for output in outputs]
            return RequestOutput(i, ids, failed, text, error=str(e))
        self._requests += begun
        self._running |= {(i, k) for k in range(params.n)}
        return RequestOutput(i, ids, outputs, text)

    def _cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._session.cancel(request)
