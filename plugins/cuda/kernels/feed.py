# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Tokens that a step chose, as inputs of the next."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def feed_sampled(token_ids, token_source, sampled, tokens, BLOCK: tl.constexpr):
    """Where ``token_source`` [T] names a row: the token of that row of ``sampled`` [N, 2].

    A row without a token is -1: its request has ended, and any id in the vocabulary does for the next step.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(token_source + at, mask=at < tokens, other=-1)
    token = tl.load(sampled + 2 * source, mask=source >= 0, other=0)
    tl.store(token_ids + at, tl.maximum(token, 0), mask=source >= 0)
