"""Modules that plugins take over: their forward becomes one op of the plugin's domain."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from castiron.errors import BuildError, UnsupportedModelError

from ..custom import ModuleTakeover
from .torch_ops import CUSTOM_OPS


def take_over(model: nn.Module, takeovers: Sequence[ModuleTakeover]) -> dict[str, str]:
    """Give the modules of each takeover a forward of one op. Returns class -> what it became.

    Raises BuildError for a class that the model does not have, naming those that it has.
    """
    CUSTOM_OPS.clear()
    CUSTOM_OPS.update({takeover.op.name: takeover.op for takeover in takeovers})
    found: dict[str, str] = {}
    for takeover in takeovers:
        modules = {name: m for name, m in model.named_modules() if _class_name(m) == takeover.module}
        if not modules:
            own = {_class_name(m) for m in model.modules() if not type(m).__module__.startswith("torch.")}
            raise BuildError(
                f"a plugin takes over {takeover.module}, which this model does not have; it has "
                f"{', '.join(sorted(own))}"
            )
        for name, module in modules.items():
            module.forward = _forward(name, module, takeover)
        found[takeover.module.rpartition(".")[2]] = takeover.op.name
    return found


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _forward(name: str, module: nn.Module, takeover: ModuleTakeover) -> Callable[..., Tensor]:
    attributes = json.dumps(dict(takeover.attributes(module)), sort_keys=True)
    op = takeover.op

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        # Here and not before: the trace puts its own tensors in the parameters' places.
        weights = [module.get_parameter(path) for path in takeover.weights]
        given = [*args, *kwargs.values()]
        tensors = [value for value in given if isinstance(value, Tensor)]
        most, least = len(op.inputs) - len(weights), op.required - len(weights)
        if not least <= len(tensors) <= most or any(tensor.shape[0] != 1 for tensor in tensors):
            raise UnsupportedModelError(
                f"{name} is called with {len(tensors)} tensors of shapes {[list(t.shape) for t in tensors]}; "
                f"the op {op.name}({', '.join(op.inputs)}) that a plugin puts there takes {most} before its "
                "weights, each with a batch axis of one"
            )
        result: Tensor = torch.ops.castiron.custom(tensors, weights, op.name, attributes)
        return result

    return forward
