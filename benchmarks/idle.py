"""Timing on a machine that others use too: wait for quiet, say how much others worked meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of a call, and CPUs' worth of work that other processes did meanwhile."""

    seconds: float
    others: float


def time_calls(
    call: Callable[[], object], count: int, budget: float = 60.0, quiet_below: float = 0.08
) -> list[Timing]:
    """Time at least ``count`` calls, each begun on a quiet machine if possible.

    Calls during which others worked do not count towards ``count`` while the budget lasts.

    Args:
        budget: seconds to go on trying.
        quiet_below: CPUs' worth of other work up to which a call counts as undisturbed.
    """
    timings: list[Timing] = []
    undisturbed, end = 0, time.monotonic() + budget
    while undisturbed < count and (len(timings) < count or time.monotonic() < end):
        wait_for_quiet()
        machine, own = _machine_seconds(), time.process_time()
        began = time.perf_counter()
        call()
        seconds = time.perf_counter() - began
        other = (_machine_seconds() - machine) - (time.process_time() - own)
        timings.append(Timing(seconds, max(0.0, other / seconds)))
        undisturbed += timings[-1].others < quiet_below
    return timings


def wait_for_quiet(limit: float = 20.0) -> None:
    """Wait, at most ``limit`` seconds, until other processes are idle."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        machine, own, began = _machine_seconds(), time.process_time(), time.perf_counter()
        time.sleep(0.3)
        busy = (_machine_seconds() - machine) - (time.process_time() - own)
        if busy < 0.15 * (time.perf_counter() - began):
            return


def _machine_seconds() -> float:
    """CPU seconds that the whole machine has been busy (proc(5): /proc/stat without idle and iowait)."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
