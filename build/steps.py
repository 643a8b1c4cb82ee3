"""The steps of a program under construction: values, their storage, and who may share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from castiron.errors import BuildError

from ..engines.program import Dim, Limits, Value
from ..plugins import Call, Lowering, Op, Operand, View
from ..plugins.host.kernels import IN_PLACE, TAKES_VIEWS
from .memory import Buffer, plan_arena
from .weight_table import WeightTable


@dataclass(frozen=True)
class _Placed:
    """A value, the storage it lies in, and the base it is a column view on."""

    shape: tuple[int | str, ...]
    dtype: Literal["f32", "i32"]
    storage: int
    base: str | None = None
    column: int = 0


@dataclass(frozen=True)
class PlannedValues:
    """Values with their offsets, and the arena they lie in."""

    values: list[Value]
    arena_bytes: int


class StepList:
    """Collects calls in order; turns views into values without storage; plans the arena at the end."""

    def __init__(self, inputs: Sequence[Operand], output: str) -> None:
        self.calls: list[Call] = []
        self._inputs = [operand.name for operand in inputs]
        self._output = output
        self._values: dict[str, _Placed] = {}
        self._storages = 0
        self._copies: dict[str, str] = {}
        self._merged: list[int] = []
        for operand in inputs:
            self._define(operand)

    def append(self, op: Op, lowering: Lowering, weights: WeightTable) -> None:
        """Add what a tactic made of an op."""
        new = {operand.name: operand for operand in (*op.outputs, *lowering.temporaries)}
        for action in lowering.actions:
            if isinstance(action, View):
                self._view(action)
                continue
            inputs = [self._readable(action.kernel, name) for name in action.inputs]
            for name in action.outputs:
                self._define(new[name])
            for use in action.weights:
                weights.use(use)
            self.calls.append(Call(action.kernel, inputs, action.outputs, action.weights, action.attrs))

    def finish(self) -> None:
        """Check the output and let kernels that may work in place do so."""
        value = self._values.get(self._output)
        if value is None:
            raise BuildError(f"no step computes {self._output!r}")
        if value.base is not None:
            raise BuildError(f"{self._output!r} is a view on {value.base!r}; expected a value of its own")
        self._merged = list(range(self._storages))
        self._share_in_place()

    def plan(self, limits: Limits) -> PlannedValues:
        """Offsets for the limits. Values that only views refer to are kept: views need their base."""
        sizes: dict[int, int] = {}
        for placed in self._values.values():
            if placed.base is None:
                storage = self._merged[placed.storage]
                sizes[storage] = max(sizes.get(storage, 0), 4 * _elements(placed.shape, limits))
        first, last = self._lifetimes()
        used = sorted(storage for storage in sizes if storage in first)
        offsets, total = plan_arena([Buffer(sizes[s], first[s], last[s]) for s in used])
        offset_of = dict(zip(used, offsets, strict=True))
        needed = self._referenced()
        values = [
            Value(
                name=name,
                dtype=placed.dtype,
                shape=cast("list[Dim]", list(placed.shape)),
                offset=0 if placed.base is not None else offset_of[self._merged[placed.storage]],
                base=placed.base,
                column=placed.column,
            )
            for name, placed in self._values.items()
            if name in needed
        ]
        return PlannedValues(values, total)

    def _referenced(self) -> set[str]:
        """Values that a step names, and the bases of views among them; the rest were views in between."""
        used = {self._output, *self._inputs}
        for call in self.calls:
            used.update(call.inputs)
            used.update(call.outputs)
        bases = {self._values[name].base for name in used}
        return used | {base for base in bases if base is not None}

    def _define(self, operand: Operand) -> None:
        if operand.name in self._values:
            raise BuildError(f"value {operand.name!r} is computed twice")
        self._values[operand.name] = _Placed(operand.shape, operand.dtype, self._storages)
        self._storages += 1

    def _view(self, view: View) -> None:
        base = self._values[view.base]
        if view.column is not None:
            # Views do not nest: a view on a view is one on its base.
            root = base.base or view.base
            self._values[view.name] = _Placed(
                view.shape, base.dtype, base.storage, root, base.column + view.column
            )
            return
        # Another shape of the same numbers: every value has bytes of its own, so that the reader and the
        # device can check that each is written before it is read.
        self._define(Operand(view.name, view.shape, base.dtype))
        self.calls.append(Call("copy", [view.base], [view.name]))

    def _readable(self, kernel: str, name: str) -> str:
        value = self._values.get(name)
        if value is None:
            raise BuildError(f"{kernel} reads {name!r}, which no earlier step computes")
        return name if value.base is None or kernel in TAKES_VIEWS else self._copy(name)

    def _copy(self, name: str) -> str:
        """A contiguous copy of a column view, made once."""
        if name not in self._copies:
            view = self._values[name]
            copy = f"{name}.contiguous"
            self._define(Operand(copy, view.shape, view.dtype))
            self.calls.append(Call("copy", [name], [copy]))
            self._copies[name] = copy
        return self._copies[name]

    def _lifetimes(self) -> tuple[dict[int, int], dict[int, int]]:
        """First and last step of each storage; graph inputs and the output live throughout their reach."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            for name in (*call.inputs, *call.outputs):
                storage = self._merged[self._values[name].storage]
                first.setdefault(storage, index)
                last[storage] = index
        for name in self._inputs:
            storage = self._merged[self._values[name].storage]
            first[storage], last[storage] = -1, len(self.calls)
        last[self._merged[self._values[self._output].storage]] = len(self.calls)
        return first, last

    def _share_in_place(self) -> None:
        _, last = self._lifetimes()
        for index, call in enumerate(self.calls):
            for output, operand in IN_PLACE.get(call.kernel, ()):
                if operand >= len(call.inputs) or output >= len(call.outputs):
                    continue
                source, target = self._values[call.inputs[operand]], self._values[call.outputs[output]]
                old, new = self._merged[source.storage], self._merged[target.storage]
                others = {
                    self._merged[self._values[name].storage]
                    for i, name in enumerate(call.inputs)
                    if i != operand
                }
                outputs = {self._merged[self._values[name].storage] for name in call.outputs}
                fits = (
                    source.base is None
                    and source.shape == target.shape
                    and source.dtype == target.dtype
                    and last[old] == index
                    and old not in others
                    and old not in outputs
                    and new == target.storage
                )
                if fits:
                    self._merged = [old if storage == new else storage for storage in self._merged]
                    last[old] = last[new]


def _elements(shape: Sequence[Any], limits: Limits) -> int:
    sizes = {"T": limits.max_num_tokens, "N": limits.max_logit_rows}
    count = 1
    for dim in shape:
        count *= sizes[dim] if isinstance(dim, str) else dim
    return count
