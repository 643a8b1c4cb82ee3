"""A run as a picture: load over time, and how latencies are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from castiron.errors import RequestError

from .load import Measured
from .outcome import Outcome
from .summary import METRICS, latencies, running_over_time, tokens_by_second

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
_COLORS = {"ttft": "#2f6fed", "tpot": "#e8590c", "itl": "#12a678", "e2el": "#9c36b5"}
_INK, _QUIET, _GRID = "#1c1e21", "#6b7280", "#e5e7eb"


def check_suffix(path: Path) -> None:
    """Refuse files that cannot be drawn, before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        raise RequestError(f"--plot {path}: expected a name that ends in {', '.join(SUFFIXES)}")


def save_plot(path: Path, measured: Measured, title: str) -> None:
    """Draw the run into ``path``; needs matplotlib.

    Raises:
        RequestError: no request succeeded.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    done = [o for o in measured.outcomes if o.error is None]
    if not done:
        raise RequestError("there is nothing to plot: no request succeeded")
    style: Any = {
        "font.size": 9, "text.color": _INK, "axes.labelcolor": _QUIET, "axes.edgecolor": _GRID,
        "xtick.color": _QUIET, "ytick.color": _QUIET, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": _GRID, "grid.linewidth": 0.6, "axes.axisbelow": True,
        "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(11, 7), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        (load, first), (gaps, whole) = figure.subplots(2, 2)
        _draw_load(load, measured, done)
        _draw_first_tokens(first, measured, done)
        values = latencies(done)
        _draw_distribution(gaps, "Time between tokens", {name: values[name] for name in ("itl", "tpot")})
        _draw_distribution(whole, "Time of a request", {name: values[name] for name in ("ttft", "e2el")})
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _draw_load(axes: Axes, measured: Measured, done: Sequence[Outcome]) -> None:
    times, counts = zip(*running_over_time(measured.outcomes), strict=True)
    axes.step(np.array(times) - measured.started, counts, where="post", color="#2f6fed", linewidth=1.4)
    axes.set(title="Load", xlabel="seconds", ylabel="requests under way", xlim=(0, measured.duration))
    axes.set_ylim(bottom=0)
    tokens = tokens_by_second(done, measured.started)
    other = axes.twinx()
    # The last second is cut short by the end of the run; its rate is over the part that there was.
    widths = [min(1.0, measured.duration - i) or 1.0 for i in range(len(tokens))]
    rates = [count / width for count, width in zip(tokens, widths, strict=True)]
    other.bar(range(len(tokens)), rates, widths, align="edge", color="#12a678", alpha=0.22)
    other.set_ylabel("output tokens/s")
    other.grid(False)


def _draw_first_tokens(axes: Axes, measured: Measured, done: Sequence[Outcome]) -> None:
    starts = [o.started - measured.started for o in done]
    axes.scatter(starts, [o.ttft * 1e3 for o in done], s=12, color=_COLORS["ttft"], alpha=0.7, linewidths=0)
    failed = [o.started - measured.started for o in measured.outcomes if o.error is not None]
    if failed:
        axes.scatter(
            failed, [0] * len(failed), s=24, marker="x", color="#e03131", label=f"{len(failed)} failed"
        )
        axes.legend(frameon=False)
    axes.set(title="First token by time of sending", xlabel="sent at, seconds", ylabel="TTFT, ms")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _draw_distribution(axes: Axes, title: str, series: dict[str, list[float]]) -> None:
    for name, values in series.items():
        if not values:
            continue
        ordered = np.sort(values)
        share = np.arange(1, len(ordered) + 1) / len(ordered) * 100
        p50, p99 = np.percentile(ordered, (50, 99))
        label = f"{METRICS[name].sign}: p50 {p50:.1f} ms, p99 {p99:.1f} ms"
        axes.step(ordered, share, where="post", color=_COLORS[name], linewidth=1.6, label=label)
        axes.scatter((p50, p99), (50, 99), s=18, color=_COLORS[name], zorder=3)
    axes.set(title=title, xlabel="milliseconds", ylabel="percent at most", ylim=(0, 101))
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="best")
