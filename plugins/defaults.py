"""The built-in tactics of every target."""

from __future__ import annotations

from collections.abc import Iterable

from . import host
from .registry import Registry
from .targets import TARGETS


def default_registry(targets: Iterable[str] = ("host",)) -> Registry:
    """A fresh registry with the built-in tactics of ``targets``; a build adds the user's to it.

    Only a CUDA target needs Triton, whose import takes a second.
    """
    tactics = list(host.TACTICS)
    if any(TARGETS[target].family == "cuda" for target in targets):
        from . import cuda

        tactics += cuda.TACTICS
    return Registry(tactics)
