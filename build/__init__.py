"""From a captured graph to an engine: limits, lowering, tactics, weight packing, memory plan, the builder.

Names are imported on first use: the workers that compile kernels need none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .builder import build as build
    from .options import BuildOptions as BuildOptions
    from .progress import Progress as Progress
    from .report import BuildPlan as BuildPlan
    from .report import BuildReport as BuildReport

_MODULES = {
    "build": "builder",
    "BuildOptions": "options",
    "BuildPlan": "report",
    "BuildReport": "report",
    "Progress": "progress",
}
__all__ = ["BuildOptions", "BuildPlan", "BuildReport", "Progress", "build"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
