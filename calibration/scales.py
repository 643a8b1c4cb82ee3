"""Scales of quantized weights: which numbers a scheme may use, where a search starts, how it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from .grids import GRIDS, Grid, power_of_two
from .recipes import ScaleKind

#: Fractions of the scale that reaches the largest weight of a group: clipping it a little often pays.
_FRACTIONS: Final = (1.0, 0.94, 0.88, 0.82, 0.76, 0.7)
_BLOCK: Final = 128
_E4M3_LEAST: Final = 2.0**-9


@dataclass(frozen=True)
class Scales:
    """The scales [N, G] that one matrix may have.

    ``group``: inputs that share one, 0: the row. ``over``: of NVFP4, the scale of the tensor.
    """

    grid: Grid
    group: int
    kind: ScaleKind
    over: float = 1.0

    def storable(self, scale: Tensor) -> Tensor:
        """The nearest scales that can be stored."""
        if self.kind == "float16":
            return scale.half().float()
        if self.kind == "nvfp4":
            rounded = GRIDS["fp8"].round(scale / self.over)
            return rounded.clamp_(min=_E4M3_LEAST).mul_(self.over)
        return scale

    def start(self, weight: Tensor) -> Tensor:
        """The scales of a format's plain definition: the largest weight of each group meets the grid's end.

        Where the grid is lopsided (int4: -8 to 7) the sign of the scale puts that weight on the longer side,
        as llama.cpp's Q4_0 does.
        """
        if self.kind == "block128":
            return _block_scales(weight, self.grid)
        blocks = grouped(weight, self.group)
        largest = blocks.abs().amax(-1)
        if self.kind == "e8m0":
            exponent = torch.frexp(largest)[1] - 3  # floor(log2(largest)) - 2; OCP MX 1.0, section 6.3
            return torch.where(largest > 0, power_of_two(exponent.clamp(-127, 127)), 1.0)
        if self.grid.low == -self.grid.high:
            scale = largest / self.grid.high
        else:
            most, least = blocks.amax(-1), blocks.amin(-1)
            scale = torch.where(most > -least, most, least) / self.grid.low
        return self.storable(torch.where(scale != 0, scale, 1.0))

    def candidates(self) -> tuple[float, ...]:
        """Factors of ``start`` that a search tries."""
        if self.kind == "block128":
            return (1.0,)
        return (1.0, 2.0, 0.5) if self.kind == "e8m0" else _FRACTIONS

    @property
    def adjustable(self) -> bool:
        """Whether a scale may take nearly any value, so that it can be fitted."""
        return self.kind in ("float32", "float16", "nvfp4")

    def search(self, weight: Tensor, importance: Tensor) -> Tensor:
        """The best candidate for each group by rounding error, weighted with ``importance`` [K] of inputs.

        Not for rounding without a text: where all inputs count the same, clipping the largest weights lowers
        the error and makes the model worse (docs/quantization.md).
        """
        first = self.start(weight)
        blocks = grouped(weight, self.group)
        cost = grouped(importance[None], self.group)
        best, least = first, torch.full_like(first, torch.inf)
        for factor in self.candidates():
            scale = self.storable(first * factor)
            error = self.grid.round(blocks / scale[..., None]).mul_(scale[..., None]).sub_(blocks).square_()
            found = error.mul_(cost).sum(-1)
            better = found < least
            best, least = torch.where(better, scale, best), torch.where(better, found, least)
        return best

    def columns(self, scale: Tensor, width: int) -> Tensor:
        """Scales [N, G] as scales of columns [N, K]; one scale a row stays [N, 1]."""
        return scale if not self.group else scale.repeat_interleave(self.group, 1)[:, :width]


def weight_scales(weight: Tensor, grid: Grid, group: int, kind: ScaleKind) -> Scales:
    """The scheme for one matrix [N, K]."""
    if kind != "nvfp4":
        return Scales(grid, group, kind)
    largest = float(weight.abs().max())
    over = torch.tensor(largest or 1.0) / (GRIDS["fp8"].high * grid.high)
    return Scales(grid, group, kind, float(over))


def grouped(matrix: Tensor, group: int) -> Tensor:
    """[N, K] as [N, G, group], zero-padded; group 0 is the row."""
    group = group or matrix.shape[1]
    short = -matrix.shape[1] % group
    padded = functional.pad(matrix, (0, short)) if short else matrix
    return padded.reshape(len(matrix), -1, group)


def _block_scales(weight: Tensor, grid: Grid) -> Tensor:
    """One scale for each 128 x 128 block, repeated for the rows of the block: [N, ceil(K/128)]."""
    rows, width = weight.shape
    padded = functional.pad(weight, (0, -width % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.reshape(padded.shape[0] // _BLOCK, _BLOCK, -1, _BLOCK)
    scale = blocks.abs().amax((1, 3)) / grid.high
    return torch.where(scale > 0, scale, 1.0).repeat_interleave(_BLOCK, 0)[:rows]
