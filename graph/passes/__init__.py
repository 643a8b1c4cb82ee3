"""Rewriting passes: small, named, ordered; each keeps the meaning of the graph (docs/passes.md)."""

from .pipeline import PASSES, PassReport, run_passes
from .rewriter import PassContext

__all__ = ["PASSES", "PassContext", "PassReport", "run_passes"]
