"""The number grids of quantized weights, on torch tensors: rounding to a grid and the codes of its numbers.

The same definitions as ``graph/weights/formats.py`` has for numpy; here they run inside searches over whole
matrices. Integers are two's complement; fp8 is e4m3fn (OCP 8-bit Floating Point 1.0), fp4 is e2m1 (OCP
Microscaling Formats 1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..graph.quant_plan import WeightFormat


@dataclass(frozen=True)
class Grid:
    """The numbers that a code of ``format`` may stand for, ``low`` to ``high``."""

    format: WeightFormat
    low: float
    high: float

    def round(self, x: Tensor) -> Tensor:
        """The nearest number of the grid, ties to even, saturated; float32 like ``x``, a new tensor."""
        limited = x.clamp(self.low, self.high)
        if self.format == "fp8":
            return limited.to(torch.float8_e4m3fn).float()
        if self.format == "fp4":
            return _round_e2m1(limited)
        return limited.round_()

    def codes(self, numbers: Tensor) -> Tensor:
        """Codes of numbers that lie on the grid: int8 for integers, uint8 for floats, one code a byte."""
        if self.format == "fp8":
            return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        if self.format == "fp4":
            doubled = (numbers.abs() * 2).to(torch.uint8)  # 0 1 2 3 4 6 8 12 for codes 0 to 7
            code = doubled - (doubled >= 6).byte() - (doubled >= 8).byte() - 3 * (doubled >= 12).byte()
            return code | (numbers.signbit().byte() << 3)
        return numbers.to(torch.int8)


def _round_e2m1(x: Tensor) -> Tensor:
    """Numbers within ±6 on 0, 0.5, 1, 1.5, 2, 3, 4, 6: steps of 0.5 below 2, of 1 below 4, then of 2.

    Rounding the count of steps to even is rounding to the even code, at the borders of the ranges too.
    """
    size = x.abs()
    step = torch.full_like(x, 0.5).masked_fill_(size >= 2, 1.0).masked_fill_(size >= 4, 2.0)
    return (x / step).round_().mul_(step)


GRIDS: Final[Mapping[WeightFormat, Grid]] = {
    "int8": Grid("int8", -127.0, 127.0),
    "int4": Grid("int4", -8.0, 7.0),
    "fp8": Grid("fp8", -448.0, 448.0),
    "fp4": Grid("fp4", -6.0, 6.0),
}


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent for integers of at least -149, exactly; float32."""
    return torch.from_numpy(np.ldexp(np.float32(1), exponent.numpy()).astype(np.float32))
