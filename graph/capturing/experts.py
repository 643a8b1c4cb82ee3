"""Experts of a mixture: two products whose matrix each token's router picks.

transformers has one interface for them (``use_experts_implementation``): the experts of a layer are one
module that gets x, the experts chosen for each token and their weights, and holds all matrices of a kind in
one parameter. Its forward is replaced by products with picked matrices around the module's own gate, which is
traced as it is, like the router before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import torch_ops

assert torch_ops  # imported for its registration of torch.ops.castiron


def has_interface(module: nn.Module) -> bool:
    """Whether transformers' experts interface has made the module's forward."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "has_bias", "_apply_gate"))


def parameters_of(module: Any) -> tuple[str, str]:
    """The parameters of the matrices of experts: those before the gate, and those behind it."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def through(module: Any, x: Tensor, multiply: Callable[[str, Tensor], Tensor]) -> Tensor:
    """What experts make of x [.., H], before it is weighted: ``multiply`` a parameter and its input."""
    first, second = parameters_of(module)
    y = multiply(first, x)
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y = multiply(second, y)
    return module.post_expert_norm(y) if getattr(module, "has_post_expert_norm", False) else y


def replace_experts(model: nn.Module) -> dict[str, str]:
    """Gives experts a forward of two products. Returns what became of each class."""
    found: dict[str, str] = {}
    for module in model.modules():
        if has_interface(module):
            module.forward = functools.partial(_forward, module)
            found[type(module).__name__] = "products with picked matrices"
    return found


def _forward(module: Any, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """x [T, H], expert_ids and weights [T, k] -> [T, H]."""

    def multiply(name: str, rows: Tensor) -> Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        picked: Tensor = torch.ops.castiron.expert_linear(
            rows, expert_ids, getattr(module, name), bias, module.is_transposed
        )
        return picked

    result: Tensor = torch.ops.castiron.combine_experts(through(module, x, multiply), weights)
    return result
