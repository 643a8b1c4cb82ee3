"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..outputs import TokenLogprob
from ..tokenizer import Tokenizer

#: JSON has no infinity; clients expect this number in its place.
_LOWEST = -9999.0


def completion_logprobs(
    tokenizer: Tokenizer | None,
    entries: Sequence[TokenLogprob | None],
    prompt_ids: Sequence[int],
    offset: int,
    top: int,
) -> dict[str, Any]:
    """The parallel arrays of /v1/completions.

    Args:
        entries: one for each token; None for a prompt's first token, which has no probability.
        prompt_ids: where the first token's id comes from in that case.
        offset: characters before the first token.
        top: how many alternatives were asked for (0 = no ``top_logprobs``).
    """
    tokens, values, offsets = [], [], []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        text = token_name(tokenizer, prompt_ids[0] if entry is None else entry.token_id)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        values.append(None if entry is None else _finite(entry.logprob))
        if entry is None or not top:
            tops.append(None)
        else:
            pairs = {token_name(tokenizer, t): _finite(p) for t, p in entry.top[:top]}
            tops.append({**pairs, text: _finite(entry.logprob)})
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if top else None,
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    """The list of objects of /v1/chat/completions."""
    return {
        "content": [
            {
                **_token(tokenizer, e.token_id, e.logprob),
                "top_logprobs": [_token(tokenizer, t, p) for t, p in e.top[:top]],
            }
            for e in entries
        ]
    }


def prompt_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob | None], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token an object by token id of itself and its alternatives.

    ``rank`` counts from 1 and is null for a token that is not among those asked for.
    """
    found: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        ranks = {t: rank for rank, (t, _) in enumerate(entry.top[:top], 1)}
        values = {entry.token_id: entry.logprob, **dict(entry.top[:top])}
        found.append(
            {
                str(t): {
                    "logprob": _finite(value),
                    "rank": ranks.get(t),
                    "decoded_token": token_name(tokenizer, t),
                }
                for t, value in values.items()
            }
        )
    return found


def token_name(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as text, as bytes where it is no UTF-8 by itself, or as its id without a tokenizer."""
    if tokenizer is None:
        return f"token_id:{token}"
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def _token(tokenizer: Tokenizer | None, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token) if tokenizer is not None else b""
    return {
        "token": token_name(tokenizer, token),
        "logprob": _finite(logprob),
        "bytes": list(raw) if raw else None,
    }


def _finite(value: float) -> float:
    return max(value, _LOWEST)
