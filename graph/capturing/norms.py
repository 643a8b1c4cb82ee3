"""Norm modules recognised by what they compute, not by their source text.

Every model file has its own RMSNorm class. Each instance is run on random numbers, and if the result is that
of ``x / sqrt(mean(x²) + eps) · w`` or ``· (1 + w)``, its forward becomes one ``castiron::rms_norm``. A norm
that matches nothing stays as it is and is traced op by op: slower, never wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .probing import real_tensors, same, with_parameters

_CANDIDATE = re.compile(r"(RMS|L2|Layer)Norm")


@dataclass(frozen=True)
class NormKind:
    """What a norm module computes. ``centered``: a LayerNorm without bias; else an RMSNorm."""

    eps: float
    one_plus: bool
    centered: bool

    def __call__(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """The same in traced ops."""
        # A weight per head and channel ([heads, D]) is no channel weight; it is multiplied apart.
        channel_weight = weight if weight is not None and weight.ndim == 1 else None
        if self.centered:
            y = functional.layer_norm(x, (x.shape[-1],), channel_weight, None, self.eps)
        else:
            one_plus = self.one_plus and channel_weight is not None
            y = torch.ops.castiron.rms_norm(x, channel_weight, self.eps, one_plus)
        if weight is not None and channel_weight is None:
            y = y * (weight + 1.0 if self.one_plus else weight)
        return y


def replace_norms(model: nn.Module) -> dict[str, str]:
    """Gives recognised norm modules a forward of one op. Returns what became of each norm class."""
    found: dict[str, str] = {}
    kinds: dict[tuple[object, ...], NormKind | None] = {}
    for module in model.modules():
        if not _is_candidate(module):
            continue
        weight = module._parameters.get("weight")
        shape = None if weight is None else tuple(weight.shape)
        key = (type(module), shape, _eps(module))
        if key not in kinds:
            kinds[key] = _recognise(module, shape)
        kind = kinds[key]
        name = type(module).__name__
        if kind is None:
            found[name] = "traced op by op"
            continue
        found[name] = (
            "LayerNormalization" if kind.centered else "RMSNorm (1 + w)" if kind.one_plus else "RMSNorm"
        )
        module.forward = _forward(module, kind)
    return found


def _forward(module: nn.Module, kind: NormKind) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        return kind(hidden_states, module._parameters.get("weight"))

    return forward


def _is_candidate(module: nn.Module) -> bool:
    if type(module) is nn.LayerNorm or not _CANDIDATE.search(type(module).__name__):
        return False
    return not list(module.children()) and set(module._parameters) <= {"weight"} and not module._buffers


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _recognise(module: nn.Module, weight_shape: tuple[int, ...] | None) -> NormKind | None:
    eps = _eps(module)
    if eps is None:
        return None
    with real_tensors() as generator:
        weight = None if weight_shape is None else torch.randn(weight_shape, generator=generator)
        twin = with_parameters(module, {} if weight is None else {"weight": weight})
        shape = (1, 5, *(weight_shape or (48,)))
        # Once with values whose squares drown eps, once with values comparable to it.
        inputs = [torch.randn(shape, generator=generator) * scale for scale in (3.0, eps**0.5)]
        try:
            outputs = [twin(x) for x in inputs]
        except Exception:  # a norm with further arguments: not one of ours
            return None
        for centered in (False, True):
            for one_plus in (False, True) if weight is not None else (False,):
                kind = NormKind(eps, one_plus, centered)
                if all(same(y, _compute(x, weight, kind)) for x, y in zip(inputs, outputs, strict=True)):
                    return kind
    return None


def _compute(x: Tensor, weight: Tensor | None, kind: NormKind) -> Tensor:
    wide = x.double()
    if kind.centered:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + kind.eps)
    if weight is not None:
        wide = wide * (weight.double() + 1.0 if kind.one_plus else weight.double())
    return wide
