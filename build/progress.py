"""How a build tells what it is doing, so that a command line can draw it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .report import BuildPlan


class Progress(Protocol):
    """Receives what happens during a build, in order, from one thread."""

    def plan(self, plan: BuildPlan) -> None:
        """The memory plan and the estimates, before anything is written."""

    def start(self, phase: str, total: int | None) -> None:
        """A phase begins; ``total`` units of work (bytes when packing), or None when unknown."""

    def advance(self, amount: int) -> None:
        """``amount`` units of the current phase are done."""

    def note(self, text: str) -> None:
        """A sentence for the user."""


class Silent:
    """Progress that goes nowhere."""

    def plan(self, plan: BuildPlan) -> None:
        """Ignore."""

    def start(self, phase: str, total: int | None) -> None:
        """Ignore."""

    def advance(self, amount: int) -> None:
        """Ignore."""

    def note(self, text: str) -> None:
        """Ignore."""


class Phases:
    """Times phases and passes them on."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str, total: int | None = None) -> Iterator[None]:
        """Run a block as ``phase``."""
        self.progress.start(phase, total)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
