"""What an engine is: its schemas, the atomic writer, the distrustful reader and the golden outputs it
carries.
"""

from __future__ import annotations

from .golden import GoldenSequence, make_golden
from .manifest import (
    FORMAT_VERSION,
    GoldenSummary,
    Manifest,
    MemoryRow,
    ModelIdentity,
    SpecialTokens,
    Verification,
)
from .program import KvLayer, Limits, Program, Step, Value, Weight
from .reader import Engine, open_engine
from .weights_file import PackedSource, layout_bytes
from .writer import EngineWriter, check_output_dir

__all__ = [
    "FORMAT_VERSION",
    "Engine",
    "EngineWriter",
    "GoldenSequence",
    "GoldenSummary",
    "KvLayer",
    "Limits",
    "Manifest",
    "MemoryRow",
    "ModelIdentity",
    "PackedSource",
    "Program",
    "SpecialTokens",
    "Step",
    "Value",
    "Verification",
    "Weight",
    "check_output_dir",
    "layout_bytes",
    "make_golden",
    "open_engine",
]
