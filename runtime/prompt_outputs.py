"""The outputs of one prompt, and the engine's requests that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .outputs import Update, joined
from .sampling_params import SamplingParams


class PromptOutputs:
    """Turns the updates of a prompt's requests into updates of its ``n`` outputs.

    Output k is request k, or one of the ``best_of`` likeliest, or a text that one beam search found. The last
    two are known when all has ended, so they come as one update each.

    Args:
        params: with ``max_tokens`` resolved.
        put: called with the number of an output and its next update, on whatever thread ``take`` is.
    """

    def __init__(self, params: SamplingParams, put: Callable[[int, Update], None]) -> None:
        self._params = params
        self._put = put
        self._ranked = params.use_beam_search or params.num_requests > params.n
        #: What to submit, one request each.
        self.requests = [params.for_request(j) for j in range(params.num_requests)]
        self._updates: list[list[Update]] = [[] for _ in self.requests]
        self._running = len(self.requests)

    def take(self, j: int, update: Update) -> None:
        """The next update of request ``j``."""
        if not self._ranked:
            self._put(j, update)
            return
        self._updates[j].append(update)
        if update.finish_reason is None or self._running == 0:
            return
        self._running -= 1
        if update.finish_reason in ("error", "cancelled"):
            self._running = 0
            self._put_all([update] * self._params.n)
        elif self._running == 0:
            self._put_all(self._found() if self._params.use_beam_search else self._best())

    def _put_all(self, updates: Sequence[Update]) -> None:
        for k, update in enumerate(updates):
            self._put(k, update)

    def _found(self) -> list[Update]:
        whole = joined(self._updates[0])
        n = self._params.n
        if len(whole.beams) < n:
            error = f"the beam search found {len(whole.beams)} texts of {n}: the rules leave no more"
            return [Update(finish_reason="error", error=error)] * n
        return [
            replace(
                beam,
                cached_tokens=whole.cached_tokens,
                prompt_logprobs=whole.prompt_logprobs if k == 0 else None,
                context_logits=whole.context_logits if k == 0 else None,
            )
            for k, beam in enumerate(whole.beams[:n])
        ]

    def _best(self) -> list[Update]:
        whole = [joined(updates) for updates in self._updates]
        scored = [replace(u, cumulative_logprob=sum(x.logprob for x in u.logprobs)) for u in whole]
        scored.sort(key=lambda u: -(u.cumulative_logprob or 0.0))
        of_prompt = whole[0]
        return [
            replace(
                update,
                cached_tokens=of_prompt.cached_tokens,  # the others find the prompt of the first
                logprobs=update.logprobs if self._params.logprobs is not None else (),
                prompt_logprobs=of_prompt.prompt_logprobs if k == 0 else None,
                context_logits=of_prompt.context_logits if k == 0 else None,
            )
            for k, update in enumerate(scored[: self._params.n])
        ]
