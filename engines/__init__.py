"""What an engine is: schemas, the atomic writer, the distrustful reader and the golden outputs.

Names are imported on first use: opening an engine must not pay for writing one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .golden import GoldenSequence as GoldenSequence
    from .golden import make_golden as make_golden
    from .manifest import FORMAT_VERSION as FORMAT_VERSION
    from .manifest import GoldenSummary as GoldenSummary
    from .manifest import Manifest as Manifest
    from .manifest import MemoryRow as MemoryRow
    from .manifest import ModelIdentity as ModelIdentity
    from .manifest import SpecialTokens as SpecialTokens
    from .manifest import Verification as Verification
    from .program import KvLayer as KvLayer
    from .program import Limits as Limits
    from .program import Program as Program
    from .program import Step as Step
    from .program import Value as Value
    from .program import Weight as Weight
    from .reader import Engine as Engine
    from .reader import open_engine as open_engine
    from .weights_file import layout_bytes as layout_bytes
    from .weights_writer import PackedSource as PackedSource
    from .writer import EngineWriter as EngineWriter
    from .writer import check_output_dir as check_output_dir

_HOMES = {
    "golden": ("GoldenSequence", "make_golden"),
    "manifest": (
        "FORMAT_VERSION",
        "GoldenSummary",
        "Manifest",
        "MemoryRow",
        "ModelIdentity",
        "SpecialTokens",
        "Verification",
    ),
    "program": ("KvLayer", "Limits", "Program", "Step", "Value", "Weight"),
    "reader": ("Engine", "open_engine"),
    "weights_file": ("layout_bytes",),
    "weights_writer": ("PackedSource",),
    "writer": ("EngineWriter", "check_output_dir"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
