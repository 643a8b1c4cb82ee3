"""A Hugging Face model without its weights: parameters are shapes only, buffers are real.

Buffers stay real because rotary frequencies, ALiBi slopes and embedding scales are computed when the model is
built and are in no checkpoint; parameters are empty, so that a 70B model takes a few hundred megabytes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from castiron.errors import UnsupportedModelError

from .attention import IMPLEMENTATION
from .patches import Patches


def build_fake_model(config: Any) -> tuple[nn.Module, FakeTensorMode]:
    """Builds the causal LM of ``config`` in float32 on fake parameters.

    The attention implementation named ``castiron`` must be registered (see ``attention.dispatch``).
    Raises UnsupportedModelError if transformers has no causal LM for the configuration.
    """
    from transformers import AutoModelForCausalLM

    with Patches() as patches:
        patches.attribute(nn.Module, "register_parameter", _register_on_meta)
        make: Any = AutoModelForCausalLM.from_config
        try:
            model = make(copy.deepcopy(config), dtype=torch.float32, attn_implementation=IMPLEMENTATION)
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"transformers cannot build a causal language model from the configuration of "
                f"'{config.model_type}': {error}"
            ) from error
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    _replace_parameters(model, mode)
    return model.eval(), mode


_register_parameter = nn.Module.register_parameter


def _register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _register_parameter(self, name, param)
    if param is not None:
        self._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=False)


def _replace_parameters(model: nn.Module, mode: FakeTensorMode) -> None:
    # Keyed by identity, so that tied weights stay one parameter. The originals are kept alive meanwhile:
    # a freed object's id could be given to the next one.
    fakes: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in fakes:
                with mode:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    fakes[id(parameter)] = (nn.Parameter(empty, requires_grad=False), parameter)
            module._parameters[name] = fakes[id(parameter)][0]
