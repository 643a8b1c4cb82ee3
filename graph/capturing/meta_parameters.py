"""Building a transformers model whose parameters have shapes and no memory."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from .patches import Patches

#: Numbers from which on not even a moment's memory is taken: the experts of a layer of DeepSeek V3 are 30 GB
#: in float32, which many systems refuse to promise.
_LARGE: Final = 1 << 28

_register_parameter = nn.Module.register_parameter
_empty: Any = torch.empty


def put_parameters_on_meta(patches: Patches) -> None:
    """While ``patches`` last, parameters of new modules lie on the meta device; buffers stay real."""
    patches.attribute(nn.Module, "register_parameter", _register_on_meta)
    patches.attribute(torch, "empty", _empty_or_meta)


def _register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _register_parameter(self, name, param)
    if param is not None:
        self._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=False)


def _empty_or_meta(*size: Any, **options: Any) -> Tensor:
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    if "device" not in options and shape.numel() >= _LARGE:
        options["device"] = "meta"
    made: Tensor = _empty(shape, **options)
    return made
