# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"
"""Random draws from rows of logits: temperature, top-k, top-p, min-p, as cpp/sampling/sampler.h defines them.

Weights are exp((logit - largest) / temperature), so that the likeliest token has weight 1. A set of likeliest
tokens is described by a *cut*: the bits of a weight, which order as weights do, and how many tokens of just
that weight are in, by rising id. Cuts are found by bisection over the bits: 30 sums instead of a sort.

Most rows have few tokens that matter. Those of at least LEAST_WEIGHT are gathered first, and all filters work
on them in registers if what they ask for lies within; rows for which it does not are drawn from as a whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_greedy import NO_TOKEN, OK, TO_BE_DRAWN

GREEDY_TEMPERATURE = tl.constexpr(1e-5)
LEAST_WEIGHT = tl.constexpr(1e-4)
_ONE = tl.constexpr(0x3F800000)


@triton.jit
def _weights(x, largest, temperature):
    """Zero below exp(-87), where float32 ends."""
    exponent = (x - largest) * (1.0 / temperature)
    return tl.where(exponent < -87.0, 0.0, tl.exp(exponent))


@triton.jit
def _largest_logit(peaks, row, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr):
    chunk = tl.arange(0, PADDED_CHUNKS)
    return tl.max(tl.load(peaks + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf")), 0)


@triton.jit
def gather_candidates(
    logits,
    peaks,
    sampled,
    temperature,
    masses,
    counts,
    candidate_logits,
    candidate_tokens,
    vocab_limit,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Grid (N, chunks): the weight of a chunk, and its tokens of at least LEAST_WEIGHT in order of their ids.

    masses f32, counts i32: [N, chunks]; a count above CANDIDATES says that not all were kept.
    candidate_logits f32, candidate_tokens i32: [N, chunks, CANDIDATES].
    """
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    if (heat < GREEDY_TEMPERATURE) | (tl.load(sampled + 2 * row + 1) != OK):
        return
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
    x = tl.where(token < vocab_limit, x, float("-inf"))
    weight = _weights(x, _largest_logit(peaks, row, CHUNKS, PADDED_CHUNKS), heat)
    kept = weight >= LEAST_WEIGHT
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    at = row * CHUNKS + tl.program_id(1)
    tl.store(masses + at, tl.sum(weight, 0))
    tl.store(counts + at, tl.sum(kept.to(tl.int32), 0))
    to = at.to(tl.int64) * CANDIDATES + place
    kept = kept & (place < CANDIDATES)
    tl.store(candidate_logits + to, x, mask=kept)
    tl.store(candidate_tokens + to, token, mask=kept)


@triton.jit
def _load_chunk(data, chunk, SHAPE: tl.constexpr):
    """Weights and ids of one chunk: of its candidates, or, if the row is taken whole, of all its tokens."""
    logits, tokens, counts, largest, heat, vocab_limit = data
    VOCAB: tl.constexpr = SHAPE[0]
    CHUNK: tl.constexpr = SHAPE[1]
    PADDED_CHUNKS: tl.constexpr = SHAPE[3]
    WIDTH: tl.constexpr = SHAPE[4]
    lane = tl.arange(0, WIDTH)
    if SHAPE[5]:
        token = chunk * CHUNK + lane
        x = tl.load(logits + token, mask=token < VOCAB, other=float("-inf"))
        x = tl.where(token < vocab_limit, x, float("-inf"))
    else:
        count = tl.sum(tl.where(tl.arange(0, PADDED_CHUNKS) == chunk, counts, 0), 0)
        token = tl.load(tokens + chunk * WIDTH + lane, mask=lane < count, other=NO_TOKEN)
        x = tl.load(logits + chunk * WIDTH + lane, mask=lane < count, other=float("-inf"))
    return _weights(x, largest, heat), token


@triton.jit
def _split(bits, tile, data, SHAPE: tl.constexpr):
    """By chunk: how many tokens' weights have exactly these bits; the count and the mass of those of more."""
    CHUNKS: tl.constexpr = SHAPE[2]
    PADDED_CHUNKS: tl.constexpr = SHAPE[3]
    if SHAPE[5]:
        index = tl.arange(0, PADDED_CHUNKS)
        equal = tl.zeros([PADDED_CHUNKS], tl.int32)
        counts = tl.zeros([PADDED_CHUNKS], tl.int32)
        masses = tl.zeros([PADDED_CHUNKS], tl.float32)
        for chunk in range(CHUNKS):
            weight, _ = _load_chunk(data, chunk, SHAPE)
            found = weight.to(tl.int32, bitcast=True)
            equal = tl.where(index == chunk, tl.sum((found == bits).to(tl.int32), 0), equal)
            counts = tl.where(index == chunk, tl.sum((found > bits).to(tl.int32), 0), counts)
            masses = tl.where(index == chunk, tl.sum(tl.where(found > bits, weight, 0.0), 0), masses)
    else:
        found = tile.to(tl.int32, bitcast=True)
        equal = tl.sum((found == bits).to(tl.int32), 1)
        counts = tl.sum((found > bits).to(tl.int32), 1)
        masses = tl.sum(tl.where(found > bits, tile, 0.0), 1)
    return equal, counts, masses


@triton.jit
def _bisect(low, wanted, tile, data, BY_COUNT: tl.constexpr, SHAPE: tl.constexpr):
    """The largest bits from which on count or mass is at least ``wanted``; ``low`` (> 0) if none above do."""
    high = low * 0 + _ONE
    while low < high:
        middle = low + (high - low + 1) // 2
        _, counts, masses = _split(middle - 1, tile, data, SHAPE)
        if BY_COUNT:
            reached = tl.sum(counts, 0) >= wanted
        else:
            reached = tl.sum(masses, 0) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
def _walk_by_weight(target, cut, ties, tile, data, SHAPE: tl.constexpr):
    """The token at which the mass passes ``target``, by falling weight, equal ones by rising id."""
    PADDED_CHUNKS: tl.constexpr = SHAPE[3]
    chunk = tl.arange(0, PADDED_CHUNKS)
    bits = _bisect(tl.maximum(cut, 1), target, tile, data, False, SHAPE)
    equal, _, above = _split(bits, tile, data, SHAPE)
    most = tl.where(bits == cut, ties, tl.sum(equal, 0))
    passed = (target - tl.sum(above, 0)) / bits.to(tl.float32, bitcast=True)
    nth = tl.minimum(tl.floor(passed).to(tl.int32) + 1, most)
    here = tl.min(tl.where(tl.cumsum(equal, 0) >= nth, chunk, PADDED_CHUNKS - 1), 0)
    nth -= tl.sum(tl.where(chunk < here, equal, 0), 0)
    weight, token = _load_chunk(data, here, SHAPE)
    same = weight.to(tl.int32, bitcast=True) == bits
    rank = tl.cumsum(same.to(tl.int32), 0)
    return tl.min(tl.where(same & (rank == nth), token, NO_TOKEN), 0)


@triton.jit
def _walk_by_id(target, masses, cut, ties, data, SHAPE: tl.constexpr):
    """The token at which the kept mass passes ``target``, by rising id.

    masses, ties: by chunk, the kept mass and the kept tokens of just the cut's weight.
    """
    PADDED_CHUNKS: tl.constexpr = SHAPE[3]
    chunk = tl.arange(0, PADDED_CHUNKS)
    # Rounding may end either walk before the target is passed: then the last kept token it is.
    last = tl.max(tl.where(masses > 0, chunk, 0), 0)
    here = tl.min(tl.where(tl.cumsum(masses, 0) > target, chunk, PADDED_CHUNKS), 0)
    here = tl.minimum(here, last)
    target -= tl.sum(tl.where(chunk < here, masses, 0.0), 0)
    weight, token = _load_chunk(data, here, SHAPE)
    bits = weight.to(tl.int32, bitcast=True)
    same = bits == cut
    rank = tl.cumsum(same.to(tl.int32), 0)
    kept = (bits > cut) | (same & (rank <= tl.sum(tl.where(chunk == here, ties, 0), 0)))
    passed = tl.cumsum(tl.where(kept, weight, 0.0), 0)
    chosen = tl.min(tl.where(kept & (passed > target), token, NO_TOKEN), 0)
    return tl.where(chosen == NO_TOKEN, tl.max(tl.where(kept, token, -1), 0), chosen)


@triton.jit
def draw(
    logits,
    peaks,
    sampled,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    masses,
    counts,
    candidate_logits,
    candidate_tokens,
    vocab_limit,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Grid (N): a token for each row that is to be drawn at random, by its number in ``uniform``.

    Without WHOLE it works on candidates and leaves rows for which they do not suffice to the launch with it.
    """
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    status = tl.load(sampled + 2 * row + 1)
    if WHOLE:
        if status != TO_BE_DRAWN:
            return
    else:
        if (heat < GREEDY_TEMPERATURE) | (status != OK):
            return
    SHAPE: tl.constexpr = (VOCAB, CHUNK, CHUNKS, PADDED_CHUNKS, CHUNK if WHOLE else CANDIDATES, WHOLE)
    chunk = tl.arange(0, PADDED_CHUNKS)
    used = chunk < CHUNKS
    largest = _largest_logit(peaks, row, CHUNKS, PADDED_CHUNKS)
    chunk_masses = tl.load(masses + row * CHUNKS + chunk, mask=used, other=0.0)
    chunk_counts = tl.load(counts + row * CHUNKS + chunk, mask=used, other=0)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor = tl.load(min_p + row)
    by_count = (k > 0) & (k < vocab_limit)
    if WHOLE:
        data = (
            logits + row.to(tl.int64) * VOCAB, candidate_tokens, chunk_counts, largest, heat, vocab_limit
        )  # fmt: skip
        tile = largest
    else:
        first = row.to(tl.int64) * (CHUNKS * CANDIDATES)
        data = (
            candidate_logits + first, candidate_tokens + first, chunk_counts, largest, heat, vocab_limit
        )  # fmt: skip
        lane = tl.arange(0, CANDIDATES)
        there = lane[None, :] < chunk_counts[:, None]
        at = candidate_logits + first + chunk[:, None] * CANDIDATES + lane[None, :]
        tile = _weights(tl.load(at, mask=there, other=float("-inf")), largest, heat)
        by_mass = (p < 1.0) & (tl.sum(tl.sum(tile, 1), 0) >= p * tl.sum(chunk_masses, 0))
        enough = tl.where(by_count, tl.sum(chunk_counts, 0) >= k, by_mass | (floor >= LEAST_WEIGHT))
        if (tl.max(chunk_counts, 0) > CANDIDATES) | (enough == 0):
            tl.store(sampled + 2 * row + 1, TO_BE_DRAWN)
            return

    # Top-k: tokens of more than `cut`, and `ties` of just that weight. Without it all that have a weight.
    cut = k * 0
    ties = k * 0
    total = tl.sum(chunk_masses, 0)
    if by_count:
        cut = _bisect(cut + 1, k, tile, data, True, SHAPE)
        equal, likelier, above = _split(cut, tile, data, SHAPE)
        ties = tl.minimum(k - tl.sum(likelier, 0), tl.sum(equal, 0))
        total = tl.sum(above, 0) + ties.to(tl.float32) * cut.to(tl.float32, bitcast=True)
    # Top-p: the smallest set of at least that mass.
    if p < 1.0:
        lower = _bisect(tl.maximum(cut, 1), p * total, tile, data, False, SHAPE)
        equal, _, above = _split(lower, tile, data, SHAPE)
        most = tl.where(by_count & (lower == cut), ties, tl.sum(equal, 0))
        missing = (p * total - tl.sum(above, 0)) / lower.to(tl.float32, bitcast=True)
        ties = tl.minimum(tl.maximum(tl.ceil(missing).to(tl.int32), 1), most)
        cut = lower
    # Min-p: at least that part of the likeliest one's weight.
    floor_bits = floor.to(tl.int32, bitcast=True)
    ties = tl.where(floor_bits > cut, 0, ties)
    cut = tl.where(floor_bits > cut, floor_bits - 1, cut)

    # What is kept, by chunk; of equal weights at the cut those with the lowest ids.
    kept_ties = chunk * 0
    if cut > 0:
        equal, _, above = _split(cut, tile, data, SHAPE)
        kept_ties = tl.minimum(tl.maximum(ties - tl.cumsum(equal, 0) + equal, 0), equal)
        chunk_masses = above + kept_ties.to(tl.float32) * cut.to(tl.float32, bitcast=True)
    target = tl.load(uniform + row) * tl.sum(chunk_masses, 0)
    if by_count:
        chosen = _walk_by_weight(target, cut, ties, tile, data, SHAPE)
    else:
        chosen = _walk_by_id(target, chunk_masses, cut, kept_ties, data, SHAPE)
    tl.store(sampled + 2 * row, chosen)
    tl.store(sampled + 2 * row + 1, OK)
