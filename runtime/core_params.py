"""From a request's SamplingParams to the parameters of the C++ engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .core_api import EngineInfo
    from .tokenizer import Tokenizer

_SAME_NAME = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "top_p_decay",
    "top_p_min",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "seed",
)
_EARLY_STOPPING: dict[bool | str, str] = {True: "first_finished", False: "likely", "never": "never"}


def core_params(
    params: SamplingParams,
    make: Callable[[], Any],
    info: EngineInfo,
    tokenizer: Callable[[], Tokenizer],
) -> Any:
    """Fill ``make()``, a ``_core.SamplingParams``; ``params`` has ``max_tokens`` resolved.

    ``tokenizer`` is asked only where text has to become tokens; it raises RequestError where there is none.
    """
    core = make()
    for name in _SAME_NAME:
        setattr(core, name, getattr(params, name))
    # A grammar that is complete allows nothing but the end.
    ends = not params.ignore_eos or params.structured_output is not None
    stops = (*params.stop_token_ids, *info.eos_token_ids) if ends else params.stop_token_ids
    core.stop_token_ids = sorted(set(stops))
    core.logprobs = -1 if params.logprobs is None else params.logprobs
    core.prompt_logprobs = -1 if params.prompt_logprobs is None else params.prompt_logprobs
    core.context_logits = params.return_context_logits
    core.generation_logits = params.return_generation_logits
    core.process_logits = bool(params.logits_processors)
    if params.use_beam_search:
        core.beam_width = params.best_of or params.n
        core.length_penalty = params.length_penalty
        core.early_stopping = _EARLY_STOPPING[params.early_stopping]
    if params.num_speculative_tokens is not None:
        core.num_speculative_tokens = params.num_speculative_tokens
    if params.top_p_reset_ids:
        core.top_p_reset_ids = list(params.top_p_reset_ids)
    if params.allowed_token_ids:
        core.allowed_token_ids = list(params.allowed_token_ids)
    if params.logit_bias:
        core.logit_bias = dict(params.logit_bias)
    if params.bad_words:
        core.bad_words = [list(run) for run in dict.fromkeys(_runs(params.bad_words, tokenizer()))]
    return core


def _runs(words: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Tokens of each word, at the beginning of a word and inside one."""
    for word in words:
        for text in (word, f" {word}"):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if tokens:
                yield tuple(tokens)
