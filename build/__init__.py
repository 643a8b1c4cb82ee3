"""From a captured graph to an engine: limits, lowering, tactics, weight packing, memory plan, the builder."""

from __future__ import annotations

from .builder import build
from .options import BuildOptions
from .progress import Progress
from .report import BuildPlan, BuildReport

__all__ = ["BuildOptions", "BuildPlan", "BuildReport", "Progress", "build"]
