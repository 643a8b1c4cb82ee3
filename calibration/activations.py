"""Rounding of activations on torch tensors: what ``graph/fake_quant.py`` defines, but fast.

ModelOpt's own NVFP4 and MX arithmetic needs a GPU; this is the arithmetic that runs anywhere, equal bit for
bit to the numpy definitions, which are checked against ml_dtypes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..graph.fake_quant import E2M1_MAX, E4M3_MAX, INT8_MAX, MX_GROUP, NVFP4_GROUP
from ..graph.quant_plan import ActivationFormat
from .grids import GRIDS, power_of_two

_MX_LARGEST_EXPONENT = {"mxfp4": 2, "mxfp8": 8}


def round_activations(x: Tensor, x_format: ActivationFormat, group: int = 0, scale: float = 0.0) -> Tensor:
    """``x`` [.., K] float32 rounded to a format and back; arguments as ``graph.fake_quant.fake_quantize``."""
    if not x_format:
        return x
    if x_format == "int8":
        return _scaled(x, "int8", INT8_MAX, group, scale)
    if x_format == "fp8":
        return _scaled(x, "fp8", E4M3_MAX, group, scale)
    if x_format == "nvfp4":
        return _nvfp4(x, scale)
    return _mx(x, x_format)


def _scaled(x: Tensor, grid: str, largest: float, group: int, scale: float) -> Tensor:
    rounded = GRIDS[grid].round  # type: ignore[index]  # int8 and fp8 are weight formats as well
    if scale:
        return rounded(x / scale).mul_(scale)
    blocks = _blocks(x, group or x.shape[-1])
    scales = _nonzero(blocks.abs().amax(-1, keepdim=True) / largest)
    return _flat(rounded(blocks / scales).mul_(scales), x)


def _nvfp4(x: Tensor, scale: float) -> Tensor:
    blocks = _blocks(x, NVFP4_GROUP)
    largest = blocks.abs().amax(-1, keepdim=True)
    if scale:
        over = torch.tensor(scale, dtype=torch.float32)
    else:
        over = _nonzero(largest.amax(-2, keepdim=True) / (E4M3_MAX * E2M1_MAX))
    scales = GRIDS["fp8"].round(largest / E2M1_MAX / over) * over
    values = GRIDS["fp4"].round(blocks / _nonzero(scales)) * scales
    return _flat(torch.where(scales > 0, values, 0.0), x)


def _mx(x: Tensor, x_format: str) -> Tensor:
    blocks = _blocks(x, MX_GROUP)
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest)[1] - 1 - _MX_LARGEST_EXPONENT[x_format]
    scales = power_of_two(exponent.clamp(-127, 127))
    grid = GRIDS["fp4" if x_format == "mxfp4" else "fp8"]
    return _flat(torch.where(largest > 0, grid.round(blocks / scales) * scales, 0.0), x)


def _blocks(x: Tensor, group: int) -> Tensor:
    """``x`` [.., K] as [.., ceil(K/group), group], zero-padded."""
    short = -x.shape[-1] % group
    padded = functional.pad(x, (0, short)) if short else x
    return padded.reshape(*x.shape[:-1], -1, group)


def _flat(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten(-2)[..., : like.shape[-1]]


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)
