"""Weight expressions: what a graph makes of checkpoint tensors before any token is known, row by row."""

from .exprs import WeightExpr
from .parts import QuantizedParts
from .weight_graph import WeightGraph

__all__ = ["QuantizedParts", "WeightExpr", "WeightGraph"]
