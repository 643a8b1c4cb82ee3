"""Weight expressions: what a graph makes of checkpoint tensors before any token is known, row by row."""

from .exprs import WeightExpr
from .module_rows import ModuleRows, ModuleWeight, module_weights
from .parts import QuantizedParts
from .weight_graph import WeightGraph

__all__ = [
    "ModuleRows",
    "ModuleWeight",
    "QuantizedParts",
    "WeightExpr",
    "WeightGraph",
    "module_weights",
]
