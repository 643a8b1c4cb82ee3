"""Op implementations ("tactics"): the registry, the built-in ones, the types a tactic is made of."""

from .defaults import default_registry
from .registry import Registry
from .tactic import Call, Lowering, Op, Operand, Tactic, View, WeightUse

__all__ = [
    "Call",
    "Lowering",
    "Op",
    "Operand",
    "Registry",
    "Tactic",
    "View",
    "WeightUse",
    "default_registry",
]
