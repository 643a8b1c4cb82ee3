"""The built-in tactics of every target."""

from __future__ import annotations

from . import host
from .registry import Registry


def default_registry() -> Registry:
    """A fresh registry that holds the built-in tactics; a build adds the user's to it."""
    return Registry(host.TACTICS)
