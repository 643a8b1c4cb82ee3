"""A quantized matrix taken apart: what a kernel that multiplies by codes is packed from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .exprs import Concat, Constant, WeightExpr


@dataclass(frozen=True)
class QuantizedParts:
    """A matrix w [N, K] as codes, with a scale for each row and ``group`` inputs.

    w[n, columns[j]] = value(codes[n, j]) * scale[n, j // group] (+ offset[n, j // group])

    Attributes:
        format: what the codes mean, a name of ``formats.CODE_DTYPES``.
        group: inputs that share a scale; 0: the whole row.
        codes: [N, K], one code a byte.
        scale, offset: float32 [N, G], G = ceil(K / group), the last group may be shorter.
        columns: int64 [K], a permutation: the input that code column j belongs to. None: j itself.
    """

    format: str
    group: int
    codes: WeightExpr
    scale: WeightExpr
    offset: WeightExpr | None = None
    columns: npt.NDArray[Any] | None = None

    def with_rows(self, pick: Callable[[WeightExpr], WeightExpr]) -> QuantizedParts:
        """The parts of the matrix whose rows are those that ``pick`` takes from a matrix."""
        offset = None if self.offset is None else pick(self.offset)
        return replace(self, codes=pick(self.codes), scale=pick(self.scale), offset=offset)

    def with_columns(self, picked: npt.NDArray[Any]) -> QuantizedParts | None:
        """The parts of w[:, picked]; None unless every column is picked once."""
        inputs = self.codes.shape[1]
        if not np.array_equal(np.sort(picked), np.arange(inputs)):
            return None
        before = np.arange(inputs) if self.columns is None else self.columns
        # Column j of the codes was input before[j]; that input is now where `picked` names it
        columns = np.argsort(picked)[before]
        return replace(self, columns=None if np.array_equal(columns, np.arange(inputs)) else columns)


def stacked(parts: Sequence[QuantizedParts | None]) -> QuantizedParts | None:
    """The parts of matrices one below the other; None if they are not quantized alike."""
    known = [part for part in parts if part is not None]
    if not known or len(known) != len(parts):
        return None
    first = known[0]
    if any((part.format, part.group) != (first.format, first.group) for part in known):
        return None
    if not all(_equal(part.columns, first.columns) for part in known):
        return None
    offset: WeightExpr | None = None
    if any(part.offset is not None for part in known):
        offset = Concat([part.offset or _zeros_like(part.scale) for part in known], 0)
    codes = Concat([part.codes for part in known], 0)
    scale = Concat([part.scale for part in known], 0)
    return replace(first, codes=codes, scale=scale, offset=offset)


def _zeros_like(scale: WeightExpr) -> WeightExpr:
    return Constant(scale.name, np.broadcast_to(np.float32(0), scale.shape))


def _equal(first: npt.NDArray[Any] | None, second: npt.NDArray[Any] | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)
