# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Edits of logits (penalties, masked tokens), the largest logit of each row, and the greedy choice."""

from __future__ import annotations

import triton
import triton.language as tl

#: SampleStatus of cpp/sampling/sampler.h, and a value that never leaves the device.
OK = tl.constexpr(0)
NOT_FINITE = tl.constexpr(1)
NOTHING_ALLOWED = tl.constexpr(2)
TO_BE_DRAWN = tl.constexpr(3)
NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def apply_edits(
    logits,
    edit_row,
    edit_token,
    edit_count,
    repetition,
    frequency,
    presence,
    saved,
    edits,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Penalise or mask one token of one row for each edit; ``saved`` [E] keeps what was there.

    A count of -1 masks. Otherwise the token was seen: its logit is divided by the row's repetition penalty
    (multiplied if negative), then ``frequency * count + presence`` is subtracted if count > 0. NaN and
    +infinity stay, so that they are still noticed.
    """
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(edit_row + edit, mask=edit < edits, other=-1)
    used = row >= 0
    at = logits + row.to(tl.int64) * VOCAB + tl.load(edit_token + edit, mask=used, other=0)
    count = tl.load(edit_count + edit, mask=used, other=0)
    x = tl.load(at, mask=used, other=0.0)
    tl.store(saved + edit, x, mask=used)
    penalty = tl.load(repetition + row, mask=used, other=1.0)
    y = tl.where(x > 0, x / penalty, x * penalty)
    per_token = tl.load(frequency + row, mask=used, other=0.0)
    once = tl.load(presence + row, mask=used, other=0.0)
    y = tl.where(count > 0, y - (per_token * count.to(tl.float32) + once), y)
    y = tl.where(count < 0, float("-inf"), y)
    tl.store(at, tl.where(x < float("inf"), y, x), mask=used)


@triton.jit
def undo_edits(logits, edit_row, edit_token, saved, edits, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Put back what ``apply_edits`` saved."""
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(edit_row + edit, mask=edit < edits, other=-1)
    used = row >= 0
    at = logits + row.to(tl.int64) * VOCAB + tl.load(edit_token + edit, mask=used, other=0)
    tl.store(at, tl.load(saved + edit, mask=used, other=0.0), mask=used)


@triton.jit
def largest_of_chunks(logits, peaks, tokens, vocab_limit, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Grid (N, chunks): the largest logit of a chunk, NaN if there is one, and its lowest token id.

    peaks f32, tokens i32: [N, chunks].
    """
    row = tl.program_id(0)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    # Masked by a constant, which keeps loads of 16 bytes whole; the limit may be any number.
    x = tl.load(logits + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
    x = tl.where(token < vocab_limit, x, float("-inf"))
    has_nan = tl.max((x != x).to(tl.int32), 0)
    peak = tl.max(tl.where(x != x, float("-inf"), x), 0)
    first = tl.min(tl.where(x == peak, token, NO_TOKEN), 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + at, tl.where(has_nan > 0, float("nan"), peak))
    tl.store(tokens + at, first)


@triton.jit
def choose_largest(peaks, tokens, sampled, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr):
    """Grid (N): [token, status] of the largest logit; of equal ones that with the lowest id."""
    row = tl.program_id(0)
    chunk = tl.arange(0, PADDED_CHUNKS)
    used = chunk < CHUNKS
    peak = tl.load(peaks + row * CHUNKS + chunk, mask=used, other=float("-inf"))
    token = tl.load(tokens + row * CHUNKS + chunk, mask=used, other=NO_TOKEN)
    has_nan = tl.max((peak != peak).to(tl.int32), 0)
    largest = tl.max(tl.where(peak != peak, float("-inf"), peak), 0)
    status = tl.where(largest == float("-inf"), NOTHING_ALLOWED, OK)
    status = tl.where((has_nan > 0) | (largest == float("inf")), NOT_FINITE, status)
    chosen = tl.min(tl.where(peak == largest, token, NO_TOKEN), 0)
    tl.store(sampled + 2 * row, tl.where(status == OK, chosen, -1))
    tl.store(sampled + 2 * row + 1, status)
