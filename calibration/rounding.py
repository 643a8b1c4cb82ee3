"""Rounding a weight matrix so that its products change least: error-compensated rounding.

The error that counts is that of the output on calibration activations: with ΔW the change of the weight and
H = XᵀX/T the second moments of its T inputs, it is tr(ΔW·H·ΔWᵀ) = mean ‖x·ΔWᵀ‖².

- ``compensate``: columns are rounded one after the other, and the error of each is made up for by the columns
  that are still free (GPTQ, Frantar et al. 2022, arXiv:2210.17323). Scales are those of the original matrix,
  so columns may be taken in any order: those with the largest activations first.
- ``fit_scales``: with the codes fixed, the scales that minimise the same error are a small linear system per
  row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .scales import Scales, grouped

#: Added to the diagonal of H, as a fraction of its mean: GPTQ's own value.
_DAMPING: Final = 0.01
#: Columns between two updates of all the rest.
_BLOCK: Final = 64
#: Pieces of the second moments: with 8, 56 % of the whole product is computed.
_PIECES: Final = 8


@dataclass(frozen=True)
class Rounded:
    """A weight [N, K] as numbers of a grid times scales [N, G], float32."""

    numbers: Tensor
    scale: Tensor
    scales: Scales

    def weight(self) -> Tensor:
        """The weight that the engine computes with."""
        return self.numbers * self.scales.columns(self.scale, self.numbers.shape[1])


def nearest(weight: Tensor, scale: Tensor, scales: Scales) -> Rounded:
    """Plain rounding."""
    numbers = scales.grid.round(weight / scales.columns(scale, weight.shape[1]))
    return Rounded(numbers, scale, scales)


def compensate(weight: Tensor, upper: Tensor, order: Tensor, scale: Tensor, scales: Scales) -> Rounded:
    """Round ``weight`` [N, K] under fixed scales, minimising the output error.

    ``upper``, ``order``: of ``inverse_factor``.
    """
    width = weight.shape[1]
    free = weight.T[order].contiguous()  # a column of the weight is a row here: contiguous
    steps = scales.columns(scale, width).T
    steps = steps[order].contiguous() if scales.group else steps.expand(width, -1)
    numbers = torch.empty_like(free)
    for start in range(0, width, _BLOCK):
        stop = min(width, start + _BLOCK)
        errors = torch.empty(stop - start, weight.shape[0])
        with _one_thread():
            for k in range(start, stop):
                numbers[k] = scales.grid.round(free[k] / steps[k])
                error = torch.sub(free[k], numbers[k] * steps[k], out=errors[k - start])
                error /= upper[k, k]
                free[k + 1 : stop].addr_(upper[k, k + 1 : stop], error, alpha=-1)
        free[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    original = torch.empty_like(numbers)
    original[order] = numbers
    return Rounded(original.T.contiguous(), scale, scales)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For steps of microseconds, which threads would spend waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def second_moments(inputs: Tensor) -> Tensor:
    """H = XᵀX/T [K, K] of inputs [T, K]; symmetric, so that little more than its upper half is computed."""
    count, width = inputs.shape
    moments = torch.empty(width, width)
    piece = -(-width // _PIECES)
    for start in range(0, width, piece):
        stop = min(width, start + piece)
        torch.matmul(inputs[:, start:stop].T, inputs[:, start:], out=moments[start:stop, start:])
        moments[stop:, start:stop] = moments[start:stop, stop:].T
    return moments.div_(count)


def inverse_factor(moments: Tensor) -> tuple[Tensor, Tensor]:
    """An upper factor U [K, K] with UᵀU the inverse of damped H, columns in the order that is returned."""
    order = torch.argsort(moments.diagonal(), descending=True)
    # With J the reversal of rows: J·H·J = L·Lᵀ gives U = J·L⁻¹·J, at half the price of inverting H itself.
    backwards = order.flip(0)
    damped = moments[backwards][:, backwards]
    damped.diagonal().add_(_DAMPING * moments.diagonal().mean() + 1e-12)
    lower = torch.linalg.cholesky(damped)
    identity = torch.eye(len(lower))
    return torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1).contiguous(), order


def fit_scales(weight: Tensor, moments: Tensor, rounded: Rounded) -> Tensor:
    """The scales [N, G] that minimise the output error of given codes: a G-by-G system for each row."""
    numbers, scales = rounded.numbers, rounded.scales
    group = scales.group or numbers.shape[1]
    groups = rounded.scale.shape[1]
    wanted = grouped(numbers * (weight @ moments), group).sum(-1)  # [N, G]
    system = torch.empty(len(weight), groups, groups)
    for g in range(groups):  # the system is symmetric: the upper half of it is enough
        start, stop = g * group, (g + 1) * group
        rest = numbers[:, start:] * (numbers[:, start:stop] @ moments[start:stop, start:])
        system[:, g, g:] = grouped(rest, group).sum(-1)
        system[:, g:, g] = system[:, g, g:]
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal += diagonal.mean(-1, keepdim=True) * 1e-4 + 1e-30
    fitted, info = torch.linalg.solve_ex(system, wanted[..., None])
    fitted = scales.storable(fitted[..., 0])
    # A group of zeros, or codes that cancel, leave their scale undecided: it stays.
    good = (info == 0)[:, None] & fitted.isfinite() & (fitted * rounded.scale > 0)
    return torch.where(good, fitted, rounded.scale)


def output_error(weight: Tensor, changed: Tensor, moments: Tensor) -> Tensor:
    """Mean squared output error of each row [N]: the diagonal of ΔW·H·ΔWᵀ."""
    delta = changed - weight
    return ((delta @ moments) * delta).sum(-1)
