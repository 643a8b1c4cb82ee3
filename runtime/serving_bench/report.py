"""A run as the table that people know, and as a file of theirs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from castiron.errors import RequestError

from .summary import METRICS

_WIDTH, _LABEL = 50, 40


def table(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The figures as text, 50 columns wide."""
    return "\n".join(
        (
            " Serving Benchmark Result ".center(_WIDTH, "="),
            *_totals(result),
            *(line for name in metrics for line in _latency(result, name, percentiles)),
            "=" * _WIDTH,
        )
    )


def _totals(result: Mapping[str, Any]) -> Iterator[str]:
    def line(label: str, key: str) -> Iterator[str]:
        value = result.get(key)
        if value is not None:
            yield f"{label + ':':<{_LABEL}} " + (f"{value:.2f}" if isinstance(value, float) else f"{value}")

    yield from line("Successful requests", "completed")
    yield from line("Failed requests", "failed")
    yield from line("Maximum request concurrency", "max_concurrency")
    if result.get("request_rate") != "inf":
        yield from line("Request rate configured (RPS)", "request_rate")
    yield from line("Benchmark duration (s)", "duration")
    yield from line("Total input tokens", "total_input_tokens")
    yield from line("Total generated tokens", "total_output_tokens")
    yield from line("Request throughput (req/s)", "request_throughput")
    yield from line("Request goodput (req/s)", "request_goodput")
    yield from line("Output token throughput (tok/s)", "output_throughput")
    yield from line("Peak output token throughput (tok/s)", "max_output_tokens_per_s")
    yield from line("Peak concurrent requests", "max_concurrent_requests")
    yield from line("Total token throughput (tok/s)", "total_token_throughput")


def _latency(result: Mapping[str, Any], name: str, percentiles: Sequence[float]) -> Iterator[str]:
    metric = METRICS[name]
    yield metric.title.center(_WIDTH, "-")
    if f"mean_{name}_ms" not in result:
        yield "no request has a value"
        return
    shown = [("Mean", "mean"), ("Median", "median"), *((f"P{p:g}", f"p{p:g}") for p in percentiles)]
    for label, key in shown:
        yield f"{f'{label} {metric.sign} (ms):':<{_LABEL}} {result[f'{key}_{name}_ms']:.2f}"


def file_name(result: Mapping[str, Any]) -> str:
    """A name for the result's file: what was measured, how hard, when."""
    rate = result["request_rate"]
    parts = [result["backend"], f"{rate}qps" if isinstance(rate, str) else f"{rate:g}qps"]
    if result["max_concurrency"] is not None:
        parts.append(f"concurrency{result['max_concurrency']}")
    model = re.sub(r"[^\w.-]+", "_", Path(result["model_id"]).name)
    return "-".join([*parts, model, result["date"]]) + ".json"


def make_folder(folder: Path) -> None:
    """Make the folder of a result, before hours are spent on measuring one that has no place.

    Raises:
        RequestError: it cannot be made, or not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written to")
    except OSError as error:
        raise RequestError(f"results cannot be written to the folder {folder}: {error}") from None


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result as one JSON object.

    Raises:
        RequestError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"the result cannot be written to {path}: {error}") from None
