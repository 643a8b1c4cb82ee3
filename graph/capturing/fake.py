"""A Hugging Face model without its weights: parameters are shapes only, buffers are real.

Buffers stay real because rotary frequencies, ALiBi slopes and embedding scales are computed when the model is
built and are in no checkpoint; parameters are empty, so that a 70B model takes a few hundred megabytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from castiron.errors import UnsupportedModelError

from .attention import IMPLEMENTATION
from .meta_parameters import put_parameters_on_meta
from .patches import Patches


def build_fake_model(config: Any) -> tuple[nn.Module, FakeTensorMode]:
    """Builds the causal LM of ``config`` in float32 on fake parameters.

    The attention implementation named ``castiron`` must be registered (see ``attention.dispatch``).
    Raises UnsupportedModelError if transformers has no causal LM for the configuration.
    """
    from transformers import AutoModelForCausalLM

    with Patches() as patches:
        put_parameters_on_meta(patches)
        make: Any = AutoModelForCausalLM.from_config
        try:
            model = make(copy.deepcopy(config), dtype=torch.float32, attn_implementation=IMPLEMENTATION)
        except Exception as error:  # model code raises many kinds on a configuration it does not like
            raise UnsupportedModelError(
                f"transformers cannot build a causal language model from the configuration of "
                f"'{config.model_type}': {_reason(error, config)}"
            ) from error
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    _replace_parameters(model, mode)
    return model.eval(), mode


def _reason(error: Exception, config: Any) -> str:
    """The first line of ``error``; of a failed look-up, the field that holds the unknown name."""
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        name = error.args[0]
        fields = [field for field, value in _flat(config.to_dict()) if value == name]
        place = " and ".join(fields) or "a field"
        return f"config.json sets {place} to {name!r}, which transformers does not know"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _flat(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


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
