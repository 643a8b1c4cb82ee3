# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Log-probabilities of raw logits: of the chosen token, and of the likeliest ones."""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_greedy import NO_TOKEN, OK


@triton.jit
def logprobs_of_chunks(
    logits,
    num_logprobs,
    peaks,
    masses,
    top_logits,
    top_tokens,
    vocab_limit,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Grid (N, chunks): the largest logit of a chunk, its sum of exponentials and its likeliest tokens.

    peaks, masses f32 [N, chunks], over the whole vocabulary; top_logits, top_tokens [N, chunks, MOST],
    of tokens below ``vocab_limit``, likeliest first, equal ones by rising id.
    """
    row = tl.program_id(0)
    wanted = tl.load(num_logprobs + row)
    if wanted < 0:
        return
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
    peak = tl.max(x, 0)
    at = row * CHUNKS + tl.program_id(1)
    tl.store(peaks + at, peak)
    # A chunk of -infinity alone weighs nothing.
    tl.store(masses + at, tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), 0))
    x = tl.where(token < vocab_limit, x, float("-inf"))
    for place in range(wanted):
        peak = tl.max(x, 0)
        first = tl.min(tl.where(x == peak, token, NO_TOKEN), 0)
        tl.store(top_logits + at * MOST + place, peak)
        tl.store(top_tokens + at * MOST + place, first)
        x = tl.where(token == first, float("-inf"), x)


@triton.jit
def logprobs_of_rows(
    logits,
    sampled,
    num_logprobs,
    peaks,
    masses,
    top_logits,
    top_tokens,
    result_tokens,
    result_logprobs,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    MOST: tl.constexpr,
    PADDED_MOST: tl.constexpr,
):
    """Grid (N): result_tokens i32 [N, MOST], -1 where unused; result_logprobs f32 [N, 1 + MOST].

    Column 0 of the latter is of the chosen token.
    """
    row = tl.program_id(0)
    wanted = tl.load(num_logprobs + row)
    if (wanted < 0) | (tl.load(sampled + 2 * row + 1) != OK):
        return
    chunk = tl.arange(0, PADDED_CHUNKS)
    used = chunk < CHUNKS
    peak = tl.load(peaks + row * CHUNKS + chunk, mask=used, other=float("-inf"))
    mass = tl.load(masses + row * CHUNKS + chunk, mask=used, other=0.0)
    largest = tl.max(peak, 0)
    log_mass = tl.log(tl.sum(mass * tl.exp(peak - largest), 0))
    chosen = tl.load(logits + row.to(tl.int64) * VOCAB + tl.load(sampled + 2 * row))
    tl.store(result_logprobs + row * (1 + MOST), chosen - largest - log_mass)

    place = tl.arange(0, PADDED_MOST)
    there = used[:, None] & (place < wanted)[None, :]
    at = (row * CHUNKS + chunk[:, None]) * MOST + place[None, :]
    x = tl.load(top_logits + at, mask=there, other=float("-inf"))
    token = tl.load(top_tokens + at, mask=there, other=NO_TOKEN)
    for place in range(MOST):
        top = tl.max(tl.max(x, 1), 0)
        first = tl.min(tl.min(tl.where(x == top, token, NO_TOKEN), 1), 0)
        listed = (place < wanted) & (top > float("-inf"))
        tl.store(result_tokens + row * MOST + place, tl.where(listed, first, -1))
        tl.store(
            result_logprobs + row * (1 + MOST) + 1 + place, tl.where(listed, top - largest - log_mass, 0.0)
        )
        x = tl.where(token == first, float("-inf"), x)
