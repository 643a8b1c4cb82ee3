"""Quantization of a model: recipes, calibration, and what a quantized engine costs in accuracy.

Names are imported on first use: the options need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Calibration as Calibration
    from .api import calibrate as calibrate
    from .options import QuantizationOptions as QuantizationOptions
    from .recipes import RECIPES as RECIPES
    from .recipes import Recipe as Recipe

_MODULES = {
    "Calibration": "api",
    "calibrate": "api",
    "QuantizationOptions": "options",
    "RECIPES": "recipes",
    "Recipe": "recipes",
}
__all__ = ["RECIPES", "Calibration", "QuantizationOptions", "Recipe", "calibrate"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
