"""The steps of a program under construction: values, their storage, and who may share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from castiron.errors import BuildError

from ..engines.program import ITEM_BYTES, Dim, DType, Value
from ..plugins import Call, Lowering, Op, Operand, View
from ..plugins.launch import KernelLaunch, Param
from ..plugins.tactic import COPY, Adapted
from .memory import Buffer, plan_arena
from .weight_table import WeightTable


@dataclass(frozen=True)
class Placed:
    """A value, the storage it lies in, and the base it is a column view on."""

    shape: tuple[int | str, ...]
    dtype: DType
    storage: int
    base: str | None = None
    column: int = 0


@dataclass(frozen=True)
class PlannedValues:
    """Values with their offsets, and the arena they lie in."""

    values: list[Value]
    arena_bytes: int


class StepList:
    """Collects calls in order; turns views into values without storage; plans the arena at the end.

    ``copier`` lowers a castiron.Copy. ``inputs_in_arena``: whether the graph's inputs lie in the arena, or in
    a block of their own.
    """

    def __init__(
        self,
        inputs: Sequence[Operand],
        output: str,
        weights: WeightTable,
        copier: Callable[[Op], Lowering],
        *,
        inputs_in_arena: bool,
    ) -> None:
        self.calls: list[Call] = []
        self._inputs = [operand.name for operand in inputs]
        self._outputs = [output]
        self._weights = weights
        self._copier = copier
        self._inputs_in_arena = inputs_in_arena
        self._values: dict[str, Placed] = {}
        self._storages = 0
        self._copies: dict[str, str] = {}
        #: What steps with adapters use beside the inputs and outputs of a call, by its number.
        self._beside: dict[int, tuple[str, ...]] = {}
        self._merged: list[int] = []
        for operand in inputs:
            self._define(operand)

    def append(self, op: Op, lowering: Lowering) -> None:
        """Add what a tactic made of an op."""
        new = {operand.name: operand for operand in (*op.outputs, *lowering.temporaries)}
        for action in lowering.actions:
            if isinstance(action, View):
                self._view(action, new.get(action.name))
            else:
                self._call(action, new)

    def adapt(self, number: int, adapted: Adapted) -> tuple[tuple[KernelLaunch, ...], tuple[str, ...]]:
        """Let a call be computed otherwise in steps with adapters; before ``finish``.

        Returns the launches, and what they use beside the call's inputs and outputs.
        """
        call = self.calls[number]
        for operand in adapted.temporaries:
            self._define(operand)
        names = {} if call.takes_views else self._copies
        used = [names.get(name, name) for name in (*adapted.reads, *(t.name for t in adapted.temporaries))]
        beside = tuple(name for name in used if name not in (*call.inputs, *call.outputs))
        self._beside[number] = beside
        return tuple(_renamed(launch, names) for launch in adapted.launches), beside

    def finish(self, results: Sequence[str] = ()) -> None:
        """Check the outputs and let kernels that may work in place do so.

        ``results``: further values that are read when the program has run.
        """
        self._outputs += results
        for name in self._outputs:
            value = self._values.get(name)
            if value is None:
                raise BuildError(f"no step computes {name!r}")
            if value.base is not None:
                raise BuildError(f"{name!r} is a view on {value.base!r}; expected a value of its own")
        self._merged = list(range(self._storages))
        self._share_in_place()

    def placed(self, name: str) -> Placed:
        """Where a value lies; raises BuildError when nothing computes it."""
        if name not in self._values:
            raise BuildError(f"no step computes {name!r}")
        return self._values[name]

    def row_stride(self, name: str) -> int:
        """Elements from one row of a value to the next."""
        value = self._values[name]
        width = (self._values[value.base] if value.base else value).shape[-1]
        if len(value.shape) != 2 or not isinstance(width, int):
            raise BuildError(f"value {name!r} of shape {list(value.shape)} has no row stride")
        return width

    def plan(self, sizes_of: Mapping[str, int]) -> PlannedValues:
        """Offsets for the largest count of each symbol. Views keep their base: they need its bytes."""
        sizes: dict[int, int] = {}
        for placed in self._values.values():
            if placed.base is None:
                storage = self._merged[placed.storage]
                size = ITEM_BYTES[placed.dtype] * _elements(placed.shape, sizes_of)
                sizes[storage] = max(sizes.get(storage, 0), size)
        if not self._inputs_in_arena:
            for name in self._inputs:
                sizes.pop(self._merged[self._values[name].storage])
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
                offset=0 if placed.base is not None else offset_of.get(self._merged[placed.storage], 0),
                base=placed.base,
                column=placed.column,
            )
            for name, placed in self._values.items()
            if name in needed
        ]
        return PlannedValues(values, total)

    def _referenced(self) -> set[str]:
        """Values that a step names, and the bases of views among them; the rest were views in between."""
        used = {*self._outputs, *self._inputs}
        for number, call in enumerate(self.calls):
            used.update(call.inputs, call.outputs, self._beside.get(number, ()))
        bases = {self._values[name].base for name in used}
        return used | {base for base in bases if base is not None}

    def _define(self, operand: Operand) -> None:
        if operand.name in self._values:
            raise BuildError(f"value {operand.name!r} is computed twice")
        self._values[operand.name] = Placed(operand.shape, operand.dtype, self._storages)
        self._storages += 1

    def _call(self, call: Call, new: Mapping[str, Operand]) -> None:
        names = {name: self._readable(call, name) for name in call.inputs}
        # Values that only launches name are scratch: written and read within the step.
        scratch = dict.fromkeys(
            str(arg.of)
            for launch in call.launches
            for arg in launch.args
            if arg.kind in ("value", "row_stride") and arg.of not in names and arg.of not in call.outputs
        )
        outputs = [*call.outputs, *(name for name in scratch if name not in self._inputs)]
        for name in outputs:
            if name not in new:
                raise BuildError(
                    f"{call.kernel} names {name!r}, which is neither an input of the call nor a value that "
                    "its tactic announces (an output of the op, or Lowering.temporaries)"
                )
            self._define(new[name])
        for use in call.weights:
            self._weights.use(use)
        launches = tuple(_renamed(launch, names) for launch in call.launches)
        inputs = [names[name] for name in call.inputs]
        self.calls.append(replace(call, inputs=inputs, outputs=outputs, launches=launches))

    def _view(self, view: View, target: Operand | None) -> None:
        base = self._values[view.base]
        if view.column is not None:
            # Views do not nest: a view on a view is one on its base.
            root = base.base or view.base
            column = base.column + view.column
            self._values[view.name] = Placed(view.shape, base.dtype, base.storage, root, column)
            return
        # Another shape of the same numbers: every value has bytes of its own, so that the reader and the
        # device can check that each is written before it is read.
        dtype = base.dtype if target is None else target.dtype
        self._copy(view.base, Operand(view.name, view.shape, dtype))

    def _readable(self, call: Call, name: str) -> str:
        value = self._values.get(name)
        if value is None:
            raise BuildError(f"{call.kernel} reads {name!r}, which no earlier step computes")
        if value.base is None or call.takes_views:
            return name
        if name not in self._copies:
            copy = Operand(f"{name}.contiguous", value.shape, value.dtype)
            self._copy(name, copy)
            self._copies[name] = copy.name
        return self._copies[name]

    def _copy(self, source: str, target: Operand) -> None:
        value = self._values[source]
        op = Op(COPY, (Operand(source, value.shape, value.dtype),), (target,))
        lowering = self._copier(op)
        if not all(isinstance(action, Call) and action.takes_views for action in lowering.actions):
            raise BuildError(f"a tactic for {COPY} must consist of calls that take views")
        self.append(op, lowering)

    def _lifetimes(self) -> tuple[dict[int, int], dict[int, int]]:
        """First and last step of each storage; graph inputs and the outputs live throughout their reach."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            for name in (*call.inputs, *call.outputs, *self._beside.get(index, ())):
                storage = self._merged[self._values[name].storage]
                first.setdefault(storage, index)
                last[storage] = index
        for name in self._inputs:
            storage = self._merged[self._values[name].storage]
            first[storage], last[storage] = -1, len(self.calls)
        for name in self._outputs:
            last[self._merged[self._values[name].storage]] = len(self.calls)
        return first, last

    def _share_in_place(self) -> None:
        _, last = self._lifetimes()
        for index, call in enumerate(self.calls):
            for output, operand in call.in_place:
                if operand >= len(call.inputs) or output >= len(call.outputs):
                    continue
                source, target = self._values[call.inputs[operand]], self._values[call.outputs[output]]
                old, new = self._merged[source.storage], self._merged[target.storage]
                others = {
                    self._merged[self._values[name].storage]
                    for i, name in enumerate(call.inputs)
                    if i != operand
                }
                others |= {self._merged[self._values[name].storage] for name in self._beside.get(index, ())}
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


def _renamed(launch: KernelLaunch, names: Mapping[str, str]) -> KernelLaunch:
    """``launch`` with contiguous copies in the place of views that its call does not take."""
    args = tuple(
        Param(arg.kind, names.get(str(arg.of), arg.of)) if arg.kind in ("value", "row_stride") else arg
        for arg in launch.args
    )
    return replace(launch, args=args)


def _elements(shape: Sequence[Any], sizes: Mapping[str, int]) -> int:
    count = 1
    for dim in shape:
        count *= sizes[dim] if isinstance(dim, str) else dim
    return count
