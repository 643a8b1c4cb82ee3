"""What a request gives back: pieces while it runs (``Update``) and the whole (``RequestOutput``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw log-softmax value of a token, and the most likely tokens at its place, best first."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(
    slots=True
)  # not frozen: there is one for each token, and making a frozen one takes five times as long
class Update:
    """What one step added to one output; nobody changes one.

    Attributes:
        text: new text; may lag behind ``token_ids`` while a character or a stop string is incomplete.
        token_ids: new tokens, without the stop token that ended the output.
        logprobs: one entry for each of ``token_ids`` when asked for, else empty.
        finish_reason: set on the last update alone.
        stop_reason: the stop string or the id of the stop token that hit; None for EOS.
        error: why ``finish_reason`` is ``error``.
        prompt_logprobs: one entry for each token of the prompt, None for the first; once, when asked for.
        context_logits: float32 [prompt tokens, vocab], once, when asked for.
        generation_logits: float32 [tokens of the output, vocab], with the last update, when asked for.
        cumulative_logprob, score: of an output that was chosen among several; see ``CompletionOutput``.
        beams: all that a beam search found, best first, with the last update of its request.
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    context_logits: npt.NDArray[np.float32] | None = None
    generation_logits: npt.NDArray[np.float32] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    beams: Sequence[Update] = ()


def joined(updates: Sequence[Update]) -> Update:
    """Consecutive updates of one output as one."""
    if len(updates) == 1:
        return updates[0]
    return replace(
        updates[-1],
        text="".join(u.text for u in updates),
        token_ids=[t for u in updates for t in u.token_ids],
        logprobs=[x for u in updates for x in u.logprobs],
        cached_tokens=max(u.cached_tokens for u in updates),
        prompt_logprobs=next((u.prompt_logprobs for u in updates if u.prompt_logprobs is not None), None),
        context_logits=next((u.context_logits for u in updates if u.context_logits is not None), None),
    )


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a prompt.

    Attributes:
        index: which of the prompt's ``n`` outputs.
        text: the text so far, without special tokens and stop strings unless asked for.
        token_ids: the tokens so far, without the EOS or stop token that ended the output.
        finish_reason: ``stop`` (EOS, stop token or string), ``length``, ``cancelled``, ``error``; None = not
            finished.
        stop_reason: the stop string or the id of the stop token that hit; None for EOS.
        logprobs: one entry for each token when asked for.
        cumulative_logprob: sum of the tokens' log-probabilities, when they were asked for or outputs ranked
            by it; the stop token's counts in a beam search alone.
        score: what a beam search ranks by: the sum divided by length ** length_penalty.
        generation_logits: float32 [tokens, vocab] when asked for, once the output is finished.
        text_diff, token_ids_diff: what the last partial result added (streaming).
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    generation_logits: npt.NDArray[np.float32] | None = None
    text_diff: str = ""
    token_ids_diff: list[int] = field(default_factory=list)

    def extended(self, update: Update) -> CompletionOutput:
        """This output with one more update."""
        total = update.cumulative_logprob
        if total is None and self.logprobs is not None:
            total = (self.cumulative_logprob or 0.0) + sum(x.logprob for x in update.logprobs)
        return replace(
            self,
            text=self.text + update.text,
            token_ids=[*self.token_ids, *update.token_ids],
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            logprobs=None if self.logprobs is None else [*self.logprobs, *update.logprobs],
            cumulative_logprob=total,
            score=update.score,
            generation_logits=_cut(update.generation_logits, len(self.token_ids) + len(update.token_ids)),
            text_diff=update.text,
            token_ids_diff=list(update.token_ids),
        )


def _cut(rows: npt.NDArray[np.float32] | None, count: int) -> npt.NDArray[np.float32] | None:
    # A stop string may end the output before its last tokens.
    return None if rows is None else rows[:count]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt.

    Attributes:
        index: place of the prompt in the call.
        prompt: the text, when text was given.
        prompt_token_ids: what the engine was given.
        outputs: ``n`` outputs.
        error: why this prompt has no (complete) output; None = all is well.
        cached_tokens: prompt tokens whose keys and values were already in the cache.
        prompt_logprobs: one entry for each token of the prompt, None for the first; when asked for.
        context_logits: float32 [prompt tokens, vocab], when asked for.
    """

    index: int
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    context_logits: npt.NDArray[np.float32] | None = None

    @property
    def finished(self) -> bool:
        """Every output has its finish reason."""
        return all(o.finish_reason is not None for o in self.outputs)

    def extended(self, k: int, update: Update) -> RequestOutput:
        """This result with one more update of output ``k``."""
        outputs = list(self.outputs)
        outputs[k] = outputs[k].extended(update)
        of_prompt: dict[str, Any] = {}
        if update.prompt_logprobs is not None:
            of_prompt["prompt_logprobs"] = list(update.prompt_logprobs)
        if update.context_logits is not None:
            of_prompt["context_logits"] = update.context_logits
        return replace(
            self,
            outputs=outputs,
            error=self.error or update.error,
            cached_tokens=max(self.cached_tokens, update.cached_tokens),
            **of_prompt,
        )
