"""Built-in tactics of the CUDA targets: Triton kernels, compiled ahead of time (docs/cuda-kernels.md)."""

from ..tactic import Tactic
from . import (
    attention,
    elementwise,
    embedding,
    experts,
    kv,
    linear,
    movement,
    norm,
    quantized_linear,
    reduction,
    rope,
    routing,
    sampling,
)

TACTICS: tuple[Tactic, ...] = (
    *linear.TACTICS,
    *quantized_linear.TACTICS,
    *experts.TACTICS,
    *routing.TACTICS,
    *norm.TACTICS,
    *embedding.TACTICS,
    *elementwise.TACTICS,
    *reduction.TACTICS,
    *movement.TACTICS,
    *rope.TACTICS,
    *kv.TACTICS,
    *attention.TACTICS,
    *sampling.TACTICS,
)
