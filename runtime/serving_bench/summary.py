"""Figures of a run, by the names that people plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .load import Measured
from .outcome import Outcome


@dataclass(frozen=True)
class Metric:
    """A latency: its title in the table, its sign there."""

    title: str
    sign: str


METRICS: Mapping[str, Metric] = {
    "ttft": Metric("Time to First Token", "TTFT"),
    "tpot": Metric("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": Metric("Inter-token Latency", "ITL"),
    "e2el": Metric("End-to-end Latency", "E2EL"),
}


def summarize(
    measured: Measured, *, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """The figures of a run. Latencies are milliseconds, of successful requests; a percentile lies between two
    values linearly. Keys without a value (no request has two tokens, say) are left out.

    Args:
        percentiles: of each metric, 0 to 100.
        goodput: milliseconds that ttft, tpot and e2el of a good request may take.
    """
    done = [o for o in measured.outcomes if o.error is None]
    seconds = measured.duration
    inputs = sum(o.prompt_tokens or 0 for o in done)
    outputs = sum(o.output_tokens for o in done)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(measured.outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": _busiest_second(done, measured.started),
        "max_concurrent_requests": _most_at_once(measured.outcomes),
    }
    if goodput:
        result["request_goodput"] = sum(_is_good(o, goodput) for o in done) / seconds
    for name, values in latencies(done).items():
        if values:
            result[f"mean_{name}_ms"] = float(np.mean(values))
            result[f"median_{name}_ms"] = float(np.median(values))
            result[f"std_{name}_ms"] = float(np.std(values))
            result |= {f"p{p:g}_{name}_ms": float(np.percentile(values, p)) for p in percentiles}
    return result


def latencies(done: Sequence[Outcome]) -> dict[str, list[float]]:
    """Milliseconds of each metric: one of a request, for itl one of each gap."""
    return {
        "ttft": [o.ttft * 1e3 for o in done],
        "tpot": [o.tpot * 1e3 for o in done if o.tpot is not None],
        "itl": [gap * 1e3 for o in done for gap in o.itls],
        "e2el": [o.e2el * 1e3 for o in done],
    }


def details(measured: Measured) -> dict[str, Any]:
    """What --save-detailed adds: a value of each request, in order; seconds."""
    outcomes = measured.outcomes
    return {
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "start_times": [o.started - measured.started for o in outcomes],
        "ttfts": [o.ttft if o.token_times else None for o in outcomes],
        "itls": [o.itls for o in outcomes],
        "e2els": [o.e2el for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error or "" for o in outcomes],
    }


def error_counts(outcomes: Sequence[Outcome]) -> list[tuple[str, int]]:
    """What went wrong and how often, the most frequent first."""
    return Counter(o.error for o in outcomes if o.error is not None).most_common()


def tokens_by_second(done: Sequence[Outcome], started: float) -> list[float]:
    """Output tokens in each second from the start; events of a request share its tokens evenly."""
    if not done:
        return []
    times = np.concatenate([o.token_times for o in done]) - started
    shares = np.concatenate([np.full(len(o.token_times), o.output_tokens / len(o.token_times)) for o in done])
    return [float(x) for x in np.bincount(times.astype(np.int64), weights=shares)]


def running_over_time(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """(time, requests under way from then on), in order."""
    changes = [(o.started, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes]
    # Of a start and an end at one time the end counts first: the one made room for the other.
    steps, running = [], 0
    for time, change in sorted(changes):
        running += change
        steps.append((time, running))
    return steps


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    return max((count for _, count in running_over_time(outcomes)), default=0)


def _busiest_second(done: Sequence[Outcome], started: float) -> float:
    return max(tokens_by_second(done, started), default=0.0)


def _is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    taken = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.e2el}
    return all((taken[name] or 0.0) * 1e3 <= limit for name, limit in limits.items())
