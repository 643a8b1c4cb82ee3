"""Which weights a program reads, each stored once."""

from __future__ import annotations

from ..engines.program import WeightDType
from ..plugins import WeightUse
from .packing import PackedSource
from .weights import WeightGraph


class WeightTable:
    """Collects the uses of weights, then decides on one stored form for each.

    A table read by token id takes any layout, so it shares the panels of a tied output projection.
    """

    def __init__(self, graph: WeightGraph, dtype: WeightDType) -> None:
        self._graph = graph
        self._dtype: WeightDType = dtype
        self._uses: dict[WeightUse, None] = {}
        self._names: dict[WeightUse, str] = {}

    def use(self, use: WeightUse) -> None:
        """Record a use."""
        self._uses.setdefault(use)

    def name_of(self, use: WeightUse) -> str:
        """The stored weight's name; valid after ``finish``."""
        return self._names[use]

    def finish(self) -> dict[str, PackedSource]:
        """Stored weights by name, in order of first use."""
        stored: dict[str, PackedSource] = {}
        for use in self._uses:
            form = use
            if use.role == "table" and WeightUse(use.parts, "matrix") in self._uses:
                form = WeightUse(use.parts, "matrix")
            if form not in self._names:
                name = self._fresh_name(form, stored)
                stored[name] = self._packed(name, form)
                self._names[form] = name
            self._names[use] = self._names[form]
        return stored

    def _fresh_name(self, use: WeightUse, stored: dict[str, PackedSource]) -> str:
        name = "|".join(use.parts)
        if len(name) > 400:  # names in the program are limited to 512 characters
            name = f"{name[:380]}...{len(stored)}"
        return name if name not in stored else f"{name}.{use.role}"

    def _packed(self, name: str, use: WeightUse) -> PackedSource:
        first, *others = (self._graph.expr(part) for part in use.parts)
        if others:
            (second,) = others
            if use.role == "vector":
                return PackedSource.gated_vector(name, first, second)
            return PackedSource.gated_panels(name, first, second, self._dtype)
        if use.role == "matrix":
            return PackedSource.panels(name, first, self._dtype)
        return PackedSource.plain(name, first, self._dtype if use.role == "table" else "f32")
