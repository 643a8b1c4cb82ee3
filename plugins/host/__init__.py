"""Built-in tactics of the ``host`` target; the kernels are those of docs/program.md."""

from ..tactic import Tactic
from . import attention, elementwise, embedding, experts, linear, norm, quantized, shape

TACTICS: tuple[Tactic, ...] = (
    *linear.TACTICS,
    *quantized.TACTICS,
    *experts.TACTICS,
    *norm.TACTICS,
    *attention.TACTICS,
    *elementwise.TACTICS,
    *shape.TACTICS,
    *embedding.TACTICS,
)
