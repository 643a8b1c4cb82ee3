"""Capture of the source model, the ONNX graph and its op vocabulary, rewriting passes, reference evaluators.

Attributes are imported on demand: reading a checkpoint needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capturing import Capture as Capture
    from .capturing import CaptureReport as CaptureReport
    from .capturing import capture as capture
    from .capturing import capture_config as capture_config

__all__ = ["Capture", "CaptureReport", "capture", "capture_config"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("castiron.graph.capturing.api"), name)
    raise AttributeError(f"module 'castiron.graph' has no attribute {name!r}")
