"""The modules of the source model whose outputs a program's products compute: what adapters can add to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ..engines.kernels import PRODUCTS
from ..engines.program import ModuleColumns
from ..graph.weights import ModuleRows, ModuleWeight
from ..plugins import Call

#: Modules that kernels of GPUs tell apart in one product.
_MOST_MODULES = 3


def module_columns(
    calls: Sequence[Call], origins: ModuleRows, modules: Mapping[str, ModuleWeight]
) -> list[list[ModuleColumns]]:
    """For each call, the columns of its product that are outputs of modules.

    A module counts where all of its outputs are found: an adapter that reached a part of them alone would
    give wrong results without a word.
    """
    found = [_columns(call, origins) for call in calls]
    covered: dict[str, set[int]] = defaultdict(set)
    for columns in found:
        for one in columns:
            covered[one.module].update(range(one.row, one.row + one.count))
    outputs = {weight.module: weight.outputs for weight in modules.values()}
    whole = {module for module, rows in covered.items() if len(rows) == outputs[module]}
    return [[one for one in columns if one.module in whole] for columns in found]


def _columns(call: Call, origins: ModuleRows) -> list[ModuleColumns]:
    if call.kernel not in PRODUCTS or (call.launches and call.adaptable is None):
        return []
    columns: list[ModuleColumns] = []
    first = 0
    for part in call.weights[0].parts:  # the matrix, or gate and up
        rows = origins.of(part)
        if rows is None:
            return []
        columns += _runs(first, rows.modules, rows.rows)
        first += len(rows.rows)
    return columns if not call.launches or starts_of(columns) else []


def starts_of(columns: Sequence[ModuleColumns]) -> tuple[int, ...]:
    """The first column of each module of a product; nothing where kernels of GPUs cannot tell them apart."""
    starts: dict[str, int] = {}
    last = ""
    for one in columns:
        if one.module != last and one.module in starts:
            return ()  # it comes again behind another
        starts.setdefault(one.module, one.column)
        last = one.module
    return tuple(starts.values()) if len(starts) <= _MOST_MODULES else ()


def _runs(first: int, modules: Sequence[str], rows: Sequence[int]) -> list[ModuleColumns]:
    """Runs of neighbours, the first at column ``first``."""
    runs: list[ModuleColumns] = []
    start = 0
    for i in range(1, len(rows) + 1):
        if i < len(rows) and modules[i] == modules[start] and rows[i] == rows[i - 1] + 1:
            continue
        runs.append(
            ModuleColumns(module=modules[start], column=first + start, row=rows[start], count=i - start)
        )
        start = i
    return runs
