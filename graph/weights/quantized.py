"""The graph's ``Quantize`` and ``Dequantize``: numbers to and from codes with a scale for each group."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from castiron.errors import BuildError

from . import formats
from .exprs import WeightExpr, piecewise
from .parts import QuantizedParts

Array = npt.NDArray[Any]


def group_count(inputs: int, group: int) -> int:
    """Scales in a row of ``inputs`` codes; ``group`` 0 is the whole row."""
    return -(-inputs // group) if group else 1


def dequantize(codes: Array, scale: Array, offset: Array | None = None, *, format: str, group: int) -> Array:
    """float32 [N, K]: value(code) * scale (+ offset), each scale [N, G] for ``group`` inputs of a row."""
    out: Array = formats.values(codes, format)
    for numbers, columns in _by_group(out, group):
        numbers *= scale[:, columns, None]
        if offset is not None:
            numbers += offset[:, columns, None]
    return out


def quantize(w: Array, scale: Array, offset: Array | None = None, *, format: str, group: int) -> Array:
    """Codes [N, K] of the numbers nearest to w, ties to even: the inverse of ``dequantize``.

    Where a scale is 0, codes are 0.
    """
    scaled = np.array(w, np.float32)
    for numbers, columns in _by_group(scaled, group):
        steps = scale[:, columns, None]
        if offset is not None:
            numbers -= offset[:, columns, None]
        np.divide(numbers, steps, out=numbers, where=steps != 0)
        np.copyto(numbers, 0, where=steps == 0)
    return formats.nearest(scaled, format)


def _by_group(matrix: Array, group: int) -> list[tuple[Array, slice]]:
    """Views [N, groups, inputs of a group] of a C-contiguous matrix, and which scales they have."""
    rows, inputs = matrix.shape
    if not group or group >= inputs:
        return [(matrix[:, None], slice(0, 1))]
    whole = inputs // group
    views = [(matrix[:, : whole * group].reshape(rows, whole, group), slice(0, whole))]
    if inputs % group:
        views.append((matrix[:, None, whole * group :], slice(whole, whole + 1)))
    return views


def _check(what: str, matrix: WeightExpr, scale: WeightExpr, offset: WeightExpr | None, group: int) -> None:
    if matrix.ndim != 2:
        raise BuildError(f"{what} {matrix.name!r}: found shape {list(matrix.shape)}, expected [N, K].")
    if group < 0:
        raise BuildError(f"{what} {matrix.name!r}: found group {group}, expected 0 or more.")
    expected = (matrix.shape[0], group_count(matrix.shape[1], group))
    for part, expr in (("scale", scale), ("offset", offset)):
        if expr is not None and (expr.shape, expr.dtype) != (expected, np.dtype(np.float32)):
            raise BuildError(
                f"{what} {matrix.name!r}: found {part} {expr.dtype.name} {list(expr.shape)}, expected "
                f"float32 {list(expected)} for groups of {group} inputs."
            )


def _rows(expr: WeightExpr | None, start: int, stop: int) -> Array | None:
    return None if expr is None else expr.rows(start, stop)


class Dequantize(WeightExpr):
    """float32 numbers of codes.

    Raises ``BuildError`` for shapes, dtypes or a format that do not go together.
    """

    def __init__(
        self, codes: WeightExpr, scale: WeightExpr, offset: WeightExpr | None, format: str, group: int
    ) -> None:
        _check("codes", codes, scale, offset, group)
        if codes.dtype != formats.CODE_DTYPES.get(format):
            raise BuildError(f"codes {codes.name!r}: found {codes.dtype.name}, which is no {format}.")
        super().__init__(codes.name, codes.shape, np.dtype(np.float32))
        self._parts = QuantizedParts(format, group, codes, scale, offset)

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        parts = self._parts
        for begin, end in piecewise(start, stop, 4 * self.row_elements):
            out[begin - start : end - start] = dequantize(
                parts.codes.rows(begin, end),
                parts.scale.rows(begin, end),
                _rows(parts.offset, begin, end),
                format=parts.format,
                group=parts.group,
            )

    def parts(self) -> QuantizedParts | None:
        """See ``WeightExpr.parts``."""
        return self._parts


class Quantize(WeightExpr):
    """Codes of the numbers nearest to those of a matrix.

    Raises ``BuildError`` for shapes, dtypes or a format that do not go together.
    """

    def __init__(
        self, w: WeightExpr, scale: WeightExpr, offset: WeightExpr | None, format: str, group: int
    ) -> None:
        _check("weight", w, scale, offset, group)
        if format not in formats.CODE_DTYPES:
            raise BuildError(f"weight {w.name!r}: unknown format {format!r} of codes.")
        super().__init__(w.name, w.shape, formats.CODE_DTYPES[format])
        self._w, self._scale, self._offset = w, scale, offset
        self._format, self._group = format, group

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        for begin, end in piecewise(start, stop, 4 * self.row_elements):
            out[begin - start : end - start] = quantize(
                self._w.rows(begin, end),
                self._scale.rows(begin, end),
                _rows(self._offset, begin, end),
                format=self._format,
                group=self._group,
            )
