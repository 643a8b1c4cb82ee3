"""Measuring an engine: random prompts, EOS ignored, greedy, a warm-up first, medians of several rounds.

Every request has a prompt of its own, so that nothing is won by reusing a prefix.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castiron.errors import RequestError

from .outputs import Update
from .request import Request
from .sampling_params import SamplingParams
from .session import Session

#: Called after each round, for a progress bar.
Progress = Callable[[], None]


@dataclass(slots=True)
class Timeline:
    """One request, by the engine's clock: this process may see many of its tokens at once, where the engine's
    thread has the priority (``chrt -f 10``) or the machine is busy.

    Attributes:
        submitted: when, in seconds of ``time.perf_counter``.
        tokens: new ones.
        ttft: seconds to the first token.
        latency: seconds to the end.
    """

    submitted: float
    tokens: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Mean seconds of the tokens after the first; None with one token."""
        return (self.latency - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Round:
    """One round of requests."""

    timelines: list[Timeline]
    input_tokens: int
    seconds: float

    @property
    def output_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(t.tokens for t in self.timelines)


def random_prompts(count: int, length: int, vocab_size: int, rng: random.Random) -> list[list[int]]:
    """Prompts of random ids; the first ids of a vocabulary are left out: special tokens live there."""
    low = min(20, vocab_size - 1)
    return [[rng.randrange(low, vocab_size) for _ in range(length)] for _ in range(count)]


def run_round(
    session: Session, prompts: Sequence[list[int]], output_len: int, max_concurrency: int | None = None
) -> Round:
    """Run the prompts, at most ``max_concurrency`` of them at once.

    Raises:
        RequestError: a request was refused or ended with an error.
    """
    params = SamplingParams(max_tokens=output_len, ignore_eos=True, detokenize=False)
    slots = threading.Semaphore(max_concurrency or len(prompts))
    left = len(prompts)
    finished = threading.Event()
    lines: list[Timeline] = []

    def sink_of(line: Timeline) -> Callable[[Update], None]:
        def sink(update: Update) -> None:
            nonlocal left
            line.tokens += len(update.token_ids)
            if update.finish_reason is not None:
                line.error = update.error
                left -= 1
                slots.release()
                if left == 0:
                    finished.set()

        return sink

    running: list[Request] = []
    began = time.perf_counter()
    try:
        for prompt in prompts:
            slots.acquire()
            line = Timeline(time.perf_counter())
            lines.append(line)
            running.append(session.submit(prompt, params, sink_of(line)))
        finished.wait()
    finally:
        for request in running:
            session.cancel(request)
    seconds = time.perf_counter() - began
    for line, request in zip(lines, running, strict=True):
        if line.error is not None:
            raise RequestError(f"a request of the benchmark failed: {line.error}")
        line.ttft, line.latency = request.first_token_seconds or 0.0, request.seconds or 0.0
    return Round(lines, sum(map(len, prompts)), seconds)


@dataclass(frozen=True)
class LatencyResult:
    """Medians over rounds of ``batch_size`` equal requests that start together.

    Attributes:
        ttft_ms: from submission to the first token of the last request to get one.
        prefill_tokens_per_s: prompt tokens of the batch over that time.
        decode_tokens_per_s: tokens after the first ones, of all requests, over the time after.
        latency_ms: from submission to the last token.
    """

    input_len: int
    output_len: int
    batch_size: int
    num_iters: int
    ttft_ms: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    tpot_ms: float | None
    latency_ms: float
    latency_percentiles_ms: dict[str, float]


def measure_latency(
    session: Session,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters: int,
    num_warmup: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> LatencyResult:
    """Time batches of one size, one after the other."""
    rng = random.Random(seed)
    rounds = []
    for i in range(num_warmup + num_iters):
        prompts = random_prompts(batch_size, input_len, session.info.vocab_size, rng)
        done = run_round(session, prompts, output_len)
        if i >= num_warmup:
            rounds.append(done)
        if progress is not None:
            progress()
    firsts = [max(t.submitted + t.ttft for t in r.timelines) - r.timelines[0].submitted for r in rounds]
    lasts = [max(t.submitted + t.latency for t in r.timelines) - r.timelines[0].submitted for r in rounds]
    decode = [last - first for first, last in zip(firsts, lasts, strict=True)]
    first, after = statistics.median(firsts), statistics.median(decode)
    more = batch_size * (output_len - 1)
    return LatencyResult(
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        num_iters=num_iters,
        ttft_ms=first * 1e3,
        prefill_tokens_per_s=batch_size * input_len / first,
        decode_tokens_per_s=more / after if more and after > 0 else None,
        tpot_ms=after / (output_len - 1) * 1e3 if output_len > 1 else None,
        latency_ms=statistics.median(lasts) * 1e3,
        latency_percentiles_ms=percentiles([x * 1e3 for x in lasts]),
    )


@dataclass(frozen=True)
class ThroughputResult:
    """The median round (by time) of several of ``num_prompts`` requests, prefill included."""

    input_len: int
    output_len: int
    num_prompts: int
    max_concurrency: int
    num_iters: int
    duration_s: float
    request_throughput: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    latency_ms: dict[str, float]


def measure_throughput(
    session: Session,
    *,
    input_len: int,
    output_len: int,
    num_prompts: int,
    max_concurrency: int | None,
    num_iters: int,
    num_warmup: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> ThroughputResult:
    """Time rounds of many requests; a new one starts when another ends."""
    rng = random.Random(seed)
    concurrency = min(max_concurrency or num_prompts, num_prompts)
    rounds = []
    for i in range(num_warmup + num_iters):
        # Warming up needs a full batch, not all the prompts.
        count = num_prompts if i >= num_warmup else min(num_prompts, session.info.max_batch_size)
        prompts = random_prompts(count, input_len, session.info.vocab_size, rng)
        done = run_round(session, prompts, output_len, concurrency)
        if i >= num_warmup:
            rounds.append(done)
        if progress is not None:
            progress()
    middle = sorted(rounds, key=lambda r: r.seconds)[len(rounds) // 2]
    tpots = [t.tpot for t in middle.timelines if t.tpot is not None]
    return ThroughputResult(
        input_len=input_len,
        output_len=output_len,
        num_prompts=num_prompts,
        max_concurrency=concurrency,
        num_iters=num_iters,
        duration_s=middle.seconds,
        request_throughput=num_prompts / middle.seconds,
        output_tokens_per_s=middle.output_tokens / middle.seconds,
        total_tokens_per_s=(middle.output_tokens + middle.input_tokens) / middle.seconds,
        ttft_ms=percentiles([t.ttft * 1e3 for t in middle.timelines]),
        tpot_ms=percentiles([x * 1e3 for x in tpots]),
        latency_ms=percentiles([t.latency * 1e3 for t in middle.timelines]),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, linearly interpolated; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)

    def at(percent: float) -> float:
        place = (len(ordered) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return {"mean": statistics.fmean(ordered)} | {f"p{p}": at(p) for p in (10, 50, 90, 99)}
