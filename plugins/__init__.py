"""Op implementations ("tactics"): the registry, the built-in ones, the types a tactic is made of."""

from .defaults import default_registry
from .registry import Registry
from .tactic import Call, Context, Lowering, Op, Operand, Quant, Tactic, View, WeightUse
from .targets import TARGETS, Target

__all__ = [
    "TARGETS",
    "Call",
    "Context",
    "Lowering",
    "Op",
    "Operand",
    "Quant",
    "Registry",
    "Tactic",
    "Target",
    "View",
    "WeightUse",
    "default_registry",
]
