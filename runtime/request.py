"""One request on the Python side: tokens become text, stop strings end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from .core_api import CoreBeam, CoreEvent
from .detokenizer import Detokenizer
from .outputs import FinishReason, TokenLogprob, Update
from .sampling_params import SamplingParams
from .text import ReasoningGate, StopMatcher

if TYPE_CHECKING:
    from .lora import AdapterUse

#: Receives a request's updates, in order, on the session's thread; must be quick and must not raise.
Sink = Callable[[Update], None]


class Request:
    """State of a running request. Owned by the session's thread once submitted.

    Args:
        prompt_ids: tokens of the prompt.
        params: with ``max_tokens`` resolved to a number.
        eos_token_ids: which stop tokens are the model's own and therefore no ``stop_reason``.
        make_detokenizer: called at the first token, so that loading the tokenizer overlaps with prefill.
        sink: gets the updates.
    """

    __slots__ = (
        "_count",
        "_detokenizer",
        "_eos",
        "_gate",
        "_last",
        "_make_detokenizer",
        "_matcher",
        "_only_tokens",
        "_scored",
        "adapter",
        "done",
        "first_token_seconds",
        "id",
        "params",
        "prompt_ids",
        "queue_seconds",
        "seconds",
        "sink",
    )

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        make_detokenizer: Callable[[], Detokenizer] | None,
        sink: Sink,
    ) -> None:
        self.id = -1
        self.adapter: AdapterUse | None = None
        self.prompt_ids = prompt_ids
        self.params = params
        self.sink = sink
        self.done = False
        #: What it waited for its first step; None until its first event.
        self.queue_seconds: float | None = None
        #: From its arrival in the engine to its first token and to its end, by the engine's clock; None until
        #: it has ended, 0 where it had no token.
        self.first_token_seconds: float | None = None
        self.seconds: float | None = None
        self._count = 0
        self._scored = False
        self._eos = eos_token_ids
        self._make_detokenizer = make_detokenizer if params.detokenize else None
        self._detokenizer: Detokenizer | None = None
        #: A stop string has hit; the logits of the output come with the engine's last event.
        self._last: Update | None = None
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._only_tokens = not params.stop and params.logprobs is None and params.prompt_logprobs is None
        self._only_tokens &= not params.return_context_logits
        markers = params.reasoning_markers if params.stop else None
        self._gate = None if markers is None else ReasoningGate(*markers)

    @property
    def complete(self) -> bool:
        """All of the output is known; the engine need not go on."""
        return self.done or self._last is not None

    def accept(self, event: CoreEvent) -> Update | None:
        """What an event adds, if anything; ``done`` is set with the last update, which a stop string may
        bring.
        """
        if self.queue_seconds is None:
            self.queue_seconds = event.queue_seconds
        elif self._only_tokens and not event.finished:
            return self._tokens(event.token_ids)
        if self._last is not None:
            return self._stopped(self._last, event)
        if event.beams:
            self.done = True
            return Update(
                finish_reason=cast(FinishReason, event.finish_reason),
                cached_tokens=event.cached_tokens,
                beams=[self._beam(beam) for beam in event.beams],
                **self._of_prompt(event),
            )
        tokens = list(event.token_ids)
        logprobs = _logprobs(tokens, event.logprobs)
        stopping = event.stop_token_id
        text = ""
        for i, token in enumerate(tokens):
            self._count += 1
            piece = self._detokenize(token)
            if self._gate is not None:
                thought, piece = self._gate.push(piece)
                text += thought
            if not self.params.stop or self._count <= self.params.min_tokens:
                text += piece
                continue
            passed = self._matcher.push(piece)
            text += passed.text
            if passed.stop is not None:
                last = Update(
                    text=text,
                    token_ids=tokens[: i + 1],
                    logprobs=logprobs[: i + 1],
                    finish_reason="stop",
                    stop_reason=passed.stop,
                    cached_tokens=event.cached_tokens,
                    **self._of_prompt(event),
                )
                return self._stopped(last, event)
        reason: FinishReason | None = None
        stop_reason: str | int | None = stopping if stopping not in self._eos else None
        if event.finished:
            self.done = True
            reason = cast(FinishReason, event.finish_reason)
            text += self._rest(stopping)
        return Update(
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=event.error or None,
            cached_tokens=event.cached_tokens,
            generation_logits=event.generation_logits,
            **self._of_prompt(event),
        )

    def _tokens(self, tokens: Sequence[int]) -> Update:
        """An event between the first and the last one of a request that asks for no more than tokens and
        text: nearly all are such, so that this must be quick.
        """
        if len(tokens) == 1:
            return Update(self._detokenize(tokens[0]), tokens)
        return Update("".join([self._detokenize(token) for token in tokens]), tokens)

    def _stopped(self, last: Update, event: CoreEvent) -> Update | None:
        """The last update after a stop string, or None while its logits are still to come."""
        if self.params.return_generation_logits and not event.finished:
            self._last = last
            return None
        self.done = True
        return replace(last, generation_logits=event.generation_logits)

    def _beam(self, beam: CoreBeam) -> Update:
        """A text that a beam search found, whole."""
        stop = beam.stop_token_id
        self._detokenizer = None  # each beam continues the prompt
        text = "".join([self._detokenize(token) for token in beam.token_ids]) + self._rest(stop)
        scores: list[TokenLogprob] = []
        if self.params.logprobs is not None:
            scores = [TokenLogprob(t, p) for t, p in zip(beam.token_ids, beam.logprobs, strict=True)]
        return Update(
            text=text,
            token_ids=list(beam.token_ids),
            logprobs=scores,
            finish_reason="length" if stop is None else "stop",
            stop_reason=None if stop in self._eos else stop,
            cumulative_logprob=beam.cumulative_logprob,
            score=beam.score,
        )

    def _of_prompt(self, event: CoreEvent) -> dict[str, Any]:
        """Fields of the update that are about the prompt."""
        scores: Any = event.prompt_logprobs
        whole = self.params.prompt_logprobs is not None and (scores or len(self.prompt_ids) == 1)
        entries: list[TokenLogprob | None] | None = None
        if whole and not self._scored:
            self._scored = True
            entries = [None, *_logprobs(self.prompt_ids[1:], scores)]
        return {"prompt_logprobs": entries, "context_logits": event.context_logits}

    def _rest(self, stop_token: int | None) -> str:
        """Text that waited for more: held back for a stop string, or bytes of an unfinished character."""
        if stop_token is not None and self.params.include_stop_str_in_output:
            last = self._detokenize(stop_token)
        else:
            last = ""
        if self._detokenizer is not None:
            last += self._detokenizer.flush()
        held = "" if self._gate is None else self._matcher.push(self._gate.flush()).text
        return held + self._matcher.flush() + last

    def _detokenize(self, token: int) -> str:
        if self._detokenizer is None:
            if self._make_detokenizer is None:
                return ""
            self._detokenizer = self._make_detokenizer()
        return self._detokenizer.push(token)


def _logprobs(tokens: list[int], entries: Any) -> list[TokenLogprob]:
    return (
        [TokenLogprob(t, e.logprob, e.top) for t, e in zip(tokens, entries, strict=False)] if entries else []
    )
