"""Which weights the programs of an engine read, each stored once in each form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from castiron.errors import BuildError

from ..engines.program import WeightDType
from ..graph.weights import WeightExpr, WeightGraph
from ..graph.weights.exprs import Concat, Constant, panelled
from ..plugins import WeightUse
from ..plugins.tactic import QuantizedRole
from ..plugins.targets import Family
from .packed import Packed
from .packing import DTYPES, PackedSource
from .packing_quantized import (
    BlockScaleSource,
    CodeSource,
    ColumnSource,
    RowScaleSource,
    ScaleSource,
    stored_dtype,
)


@dataclass(frozen=True)
class _Form:
    """How a weight is stored: panels of 16 rows (host's matrices) or plain rows."""

    parts: tuple[str, ...]
    kind: Literal["panels", "rows"]
    #: None where the quantized matrix decides.
    dtype: WeightDType | None
    #: Biases of gated products follow their panels on host.
    interleaved: bool = False
    #: The part of a quantized matrix.
    of: QuantizedRole | None = None
    #: A tactic's own numbers.
    values: tuple[float, ...] = ()
    #: Matrices that each begin with a panel of their own.
    stacked: int = 1


class WeightPool:
    """The stored weights of an engine: programs of several targets share those of equal form."""

    def __init__(self, graph: WeightGraph) -> None:
        self.graph = graph
        self._stored: dict[_Form, Packed] = {}
        self._names: set[str] = set()

    def source(self, form: _Form) -> Packed:
        """The stored weight of this form, made on first use."""
        if form not in self._stored:
            name = self._fresh_name(form)
            self._names.add(name)
            self._stored[form] = self._packed(name, form)
        return self._stored[form]

    def _fresh_name(self, form: _Form) -> str:
        name = "|".join(form.parts) or f"numbers.{len(self._names)}"
        if len(name) > 400:  # names in the program are limited to 512 characters
            name = f"{name[:380]}...{len(self._names)}"
        if form.of is not None:
            name = f"{name}.{form.of}"
        for candidate in (name, f"{name}.{form.kind}", f"{name}.{form.kind}.{form.dtype}"):
            if candidate not in self._names:
                return candidate
        raise BuildError(f"weight {name!r} is needed in more forms than there are names for")

    def _packed(self, name: str, form: _Form) -> Packed:
        if form.values:
            return PackedSource.plain(name, Constant(name, np.array(form.values, np.float32)), "f32")
        exprs = [panelled(self.graph.expr(part), form.stacked) for part in form.parts]
        if form.of is not None:
            return _quantized(name, exprs, form.of, panels=form.kind == "panels")
        assert form.dtype is not None
        if form.kind == "panels":
            if len(exprs) == 2:
                return PackedSource.gated_panels(name, exprs[0], exprs[1], form.dtype)
            return PackedSource.panels(name, exprs[0], form.dtype)
        if form.interleaved:
            return PackedSource.gated_vector(name, exprs[0], exprs[1])
        expr = exprs[0] if len(exprs) == 1 else Concat(exprs, 0)
        return PackedSource.plain(name, expr, form.dtype)


def _quantized(name: str, exprs: list[WeightExpr], role: QuantizedRole, *, panels: bool) -> Packed:
    parts = [found for expr in exprs if (found := expr.parts()) is not None]
    if len(parts) != len(exprs):
        raise BuildError(f"weight {name!r} is not quantized; a tactic asks for its {role}")
    if role == "codes":
        return CodeSource(name, parts, panels=panels)
    scales = [part.scale for part in parts]
    offsets = [part.offset for part in parts]
    if role == "scales":
        # Host's kernels read scales and offsets of one type; those for rows are compiled for each scale type.
        numbers = [*scales, *(offset for offset in offsets if offset is not None)]
        wide = panels and any(stored_dtype(expr) != "f16" for expr in numbers)
        return ScaleSource(name, scales, panels=panels, wide=wide)
    if role == "block_scales":
        return BlockScaleSource(name, parts)
    if role == "row_scales":
        return RowScaleSource(name, parts)
    if role == "columns":
        columns = parts[0].columns
        if columns is None:
            raise BuildError(f"weight {name!r} has its columns in order; a tactic asks for their order")
        return ColumnSource(name, columns)
    if all(offset is None for offset in offsets):
        raise BuildError(f"weight {name!r} has no offsets; a tactic asks for them")
    filled = [
        offset or Constant(part.scale.name, np.zeros(part.scale.shape, np.float32))
        for offset, part in zip(offsets, parts, strict=True)
    ]
    # Kernels for rows are compiled for float32 offsets.
    wide = not panels or any(stored_dtype(scale) != "f16" for scale in scales)
    return ScaleSource(name, filled, panels=panels, wide=wide)


class WeightTable:
    """Collects the uses of weights by one program, then decides on the stored form of each.

    A table read by token id takes any layout, so on host it shares the panels of a tied output projection.
    """

    def __init__(self, pool: WeightPool, dtype: WeightDType, family: Family) -> None:
        self._pool = pool
        self._dtype: WeightDType = dtype
        self._panels = family == "host"
        self._uses: dict[WeightUse, None] = {}
        self._sources: dict[WeightUse, Packed] = {}

    def use(self, use: WeightUse) -> None:
        """Record a use."""
        self._uses.setdefault(use)

    def name_of(self, use: WeightUse) -> str:
        """The stored weight's name; valid after ``finish``."""
        return self._sources[use].name

    def finish(self) -> dict[str, Packed]:
        """Stored weights by name, in order of first use."""
        self._sources = {use: self._pool.source(self._form(use)) for use in self._uses}
        return {source.name: source for source in self._sources.values()}

    def _form(self, use: WeightUse) -> _Form:
        if use.values:
            return _Form((), "rows", "f32", values=use.values)
        if use.role == "vector":
            pair = self._panels and len(use.parts) == 2
            return _Form(use.parts, "rows", "f32", interleaved=pair, stacked=use.stacked if pair else 1)
        if use.role == "plain":
            return _Form(use.parts, "rows", self._dtype)
        if use.role == "matrix" or use.role == "table":
            shared = use.role == "table" and WeightUse(use.parts, "matrix") in self._uses
            panels = self._panels and (use.role == "matrix" or shared)
            stacked = use.stacked if panels else 1
            kind: Literal["panels", "rows"] = "panels" if panels else "rows"
            return _Form(use.parts, kind, self._matrix_dtype(use.parts), stacked=stacked)
        if self._panels:
            return _Form(use.parts, "panels", None, of=use.role, stacked=use.stacked)
        return _Form(use.parts, "rows", None, of=use.role)

    def _matrix_dtype(self, parts: tuple[str, ...]) -> WeightDType:
        """The build's; on host, numbers that a checkpoint has in bf16 stay so in a float32 engine too.

        Its kernels widen them and keep activations in float32 (``x_format`` float): the same bits from half
        the bytes, and bytes are what a decode waits for.
        """
        if self._dtype != "f32" or not self._panels:
            return self._dtype
        narrow = DTYPES["bf16"]
        stored = (self._pool.graph.expr(part).without_upcast().dtype for part in parts)
        return "bf16" if all(dtype == narrow for dtype in stored) else "f32"
