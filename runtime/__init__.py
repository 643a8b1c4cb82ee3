"""Running engines: ModelRunner, the async engine, tokenization and the OpenAI-compatible server.

Names are imported on first use: ``from castiron import ModelRunner`` must not pay for asyncio or the server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_engine import AsyncEngine as AsyncEngine
    from .model_runner import ModelRunner as ModelRunner
    from .outputs import CompletionOutput as CompletionOutput
    from .outputs import RequestOutput as RequestOutput
    from .sampling_params import SamplingParams as SamplingParams
    from .structured_output import StructuredOutput as StructuredOutput

_HOMES = {
    "AsyncEngine": "async_engine",
    "CompletionOutput": "outputs",
    "ModelRunner": "model_runner",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutput": "structured_output",
}
__all__ = [
    "AsyncEngine",
    "CompletionOutput",
    "ModelRunner",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
