"""Whether an engine can serve a request: its prompt's tokens, its length, what needs a tokenizer."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .param_values import shown
from .request_errors import ContextLengthError, ParameterError
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .core_api import EngineInfo


def check_request(
    prompt_ids: Any, params: SamplingParams, info: EngineInfo, default_max_tokens: int | None = None
) -> tuple[list[int], SamplingParams]:
    """A prompt as a list of ids and the parameters with ``max_tokens`` resolved.

    Args:
        default_max_tokens: instead of as many as fit, when ``params`` says nothing; lowered to what fits.

    Raises:
        ParameterError: ids that are none of the vocabulary, stop strings without a tokenizer.
        ContextLengthError: prompt and new tokens do not fit into ``max_seq_len``.
    """
    limit, asked = info.max_seq_len, params.max_tokens
    if params.truncate_prompt_tokens is None:
        # Before a look at each of what may be millions of ids.
        _check_length(_length(prompt_ids), asked, limit)
    ids = check_prompt(prompt_ids, info.vocab_size)
    if params.truncate_prompt_tokens is not None:
        room = max(1, limit - (1 if asked is None else asked))
        ids = ids[-(room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens) :]
    _check_length(len(ids), asked, limit)
    if params.stop and info.tokenizer_dir is None:
        raise ParameterError(
            "stop strings need a tokenizer, and this engine has none; use stop_token_ids", param="stop"
        )
    if params.bad_words and info.tokenizer_dir is None:
        raise ParameterError(
            "bad_words need a tokenizer, and this engine has none; use logit_bias", param="bad_words"
        )
    _check_token_ids(params, info.vocab_size)
    if asked is None:
        asked = min(limit - len(ids), default_max_tokens or limit)
    resolved = replace(params, max_tokens=asked)
    return ids, resolved


def check_prompt(prompt: Any, vocab_size: int) -> list[int]:
    """A prompt as a flat list of ids of the vocabulary, at least one; ParameterError for anything else."""
    prompt = as_lists("a prompt", prompt)
    ids = _integers(prompt)
    if ids == []:
        raise ParameterError("a prompt is empty; expected at least one token", param="prompt")
    if ids is None:
        views = (bytes, bytearray, memoryview)
        found = f"of type {type(prompt).__name__}" if isinstance(prompt, views) else shown(prompt)
        raise ParameterError(f"a prompt is {found}; expected a list of token ids", param="prompt")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(t for t in ids if not 0 <= t < vocab_size)
        found = str(wrong) if -(2**63) <= wrong < 2**63 else "of more than 64 bits"
        raise ParameterError(
            f"a prompt holds the token id {found}; expected ids from 0 to {vocab_size - 1}", param="prompt"
        )
    return ids


def as_lists(name: str, ids: Any) -> Any:
    """The numbers of an array or a tensor as lists; anything else as it is, views of memory included, which
    are bytes as a rule.

    Raises ParameterError where there are no numbers to read: in a sparse tensor, or one of the meta device.
    """
    if isinstance(ids, memoryview) or not hasattr(ids, "tolist"):
        return ids
    try:
        return ids.tolist()
    except (RuntimeError, TypeError, ValueError) as e:
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise ParameterError(
            f"{name} is of type {type(ids).__name__} and its numbers cannot be read ({reason}); expected a "
            "list, or an array or dense tensor in memory",
            param="prompt",
        ) from None


def _length(prompt: Any) -> int:
    """Ids of a prompt that nobody has looked at yet; 0 where that cannot be told."""
    if isinstance(prompt, memoryview):
        return 0
    return len(prompt) if isinstance(prompt, (list, tuple, range)) or getattr(prompt, "ndim", 0) == 1 else 0


def _check_length(count: int, asked: int | None, limit: int) -> None:
    """Raise ContextLengthError where ``count`` ids and as many new tokens as are asked for do not fit."""
    least = count + (1 if asked is None else asked)
    if least > limit:
        wanted = f"{asked} new tokens" if asked is not None else "at least one new token"
        raise ContextLengthError(
            f"this model's maximum context length is {limit} tokens, but {least} were requested "
            f"({count} in the prompt and {wanted}); shorten the prompt, lower max_tokens, or "
            "build the engine with a larger --max-seq-len",
            param="prompt" if count >= limit else "max_tokens",
        )


def _integers(prompt: Any) -> list[int] | None:
    """The items of a sequence of integers, numpy's included; None for anything else."""
    if not isinstance(prompt, (list, tuple, range)):
        return None
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return list(prompt)
    if bool in kinds:
        return None
    try:
        return [operator.index(item) for item in prompt]
    except (TypeError, RuntimeError):  # torch's, of a scalar without a number
        return None


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise ParameterError for ids that the vocabulary does not have."""
    given: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "top_p_reset_ids": params.top_p_reset_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": params.logit_bias,
    }
    for name, tokens in given.items():
        for token in tokens:
            if token >= vocab_size:
                raise ParameterError(
                    f"{name} holds {token}; expected ids below the vocabulary size {vocab_size}", param=name
                )
