"""Which rows of which modules of the source model a weight expression holds.

Passes join, cut and permute the matrices of Linears. An adapter (LoRA) is written for the modules as the
source model has them, so an engine must know where their outputs are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from .. import ops
from .weight_graph import WeightGraph

Array = npt.NDArray[Any]

#: Ops that leave rows where they are, for a matrix.
_SAME_ROWS: Final = frozenset({"Identity", "Cast"})


@dataclass(frozen=True)
class ModuleWeight:
    """A value that is the weight of a module.

    Attributes:
        module: path in the source model, "model.layers.0.mlp.up_proj".
        outputs: output features of the module.
        transposed: the value is [inputs, outputs], as GPT-2's Conv1D has it.
    """

    module: str
    outputs: int
    transposed: bool = False


@dataclass(frozen=True)
class RowOrigins:
    """Row i of a matrix is output ``rows[i]`` of the module ``modules[i]``."""

    modules: tuple[str, ...]
    rows: tuple[int, ...]


def module_weights(model: onnx.ModelProto) -> dict[str, ModuleWeight]:
    """The weights of the captured graph's Linears by the names of their values.

    A weight that several modules share says nothing about which one is meant, and is left out.
    """
    producers = {output: node for node in model.graph.node for output in node.output}
    graph = WeightGraph(model)
    found: dict[str, ModuleWeight] = {}
    shared: set[str] = set()

    def note(name: str, weight: ModuleWeight) -> None:
        if found.setdefault(name, weight) != weight:
            shared.add(name)

    for node in model.graph.node:
        path, _, _ = node.name.rpartition("/")
        if node.domain != ops.DOMAIN or node.op_type != "Linear" or not path:
            continue
        name = node.input[1]
        if not graph.is_weight(name):
            continue
        module, outputs = path.replace("/", "."), graph.expr(name).shape[0]
        note(name, ModuleWeight(module, outputs))
        source = producers.get(name)
        while source is not None and source.op_type in _SAME_ROWS:
            name = source.input[0]
            note(name, ModuleWeight(module, outputs))
            source = producers.get(name)
        if source is not None and source.op_type == "Transpose":
            note(source.input[0], ModuleWeight(module, outputs, transposed=True))
    return {name: weight for name, weight in found.items() if name not in shared}


class ModuleRows:
    """Follows weight expressions of a rewritten graph back to the modules of the source model."""

    def __init__(
        self, model: onnx.ModelProto, graph: WeightGraph, modules: Mapping[str, ModuleWeight]
    ) -> None:
        self._graph = graph
        self._modules = modules
        self._producers = {
            output: (node, index) for node in model.graph.node for index, output in enumerate(node.output)
        }
        self._known: dict[str, RowOrigins | None] = {}

    def of(self, name: str) -> RowOrigins | None:
        """Where the rows of a matrix come from; None where they are anything else than rows of modules."""
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def _find(self, name: str) -> RowOrigins | None:
        known = self._modules.get(name)
        if known is not None:
            return None if known.transposed else _whole(known)
        if name not in self._producers:
            return None
        node, index = self._producers[name]
        attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
        if node.domain == ops.DOMAIN and node.op_type == "Dequantize":
            source = self._modules.get(attrs.get("source", b"").decode())
            return None if source is None else _whole(source)
        if node.domain:
            return None
        if node.op_type == "Transpose":
            inner = self._modules.get(node.input[0])
            return _whole(inner) if inner is not None and inner.transposed else None
        if node.op_type == "Concat" and attrs["axis"] == 0:
            return _joined([self.of(part) for part in node.input])
        inner_rows = self.of(node.input[0])
        if inner_rows is None:
            return None
        return self._moved(node, index, attrs, inner_rows)

    def _moved(
        self, node: onnx.NodeProto, index: int, attrs: Mapping[str, Any], source: RowOrigins
    ) -> RowOrigins | None:
        """The rows that an op leaves, by carrying it out on their numbers."""
        numbers = np.arange(len(source.rows))
        operands = [self._graph.value(name) for name in node.input[1:] if name]
        shape = self._graph.expr(node.input[0]).shape
        match node.op_type:
            case op if op in _SAME_ROWS:
                picked = numbers
            case "Reshape" if self._graph.expr(node.output[0]).shape == shape:
                picked = numbers
            case "Gather" if attrs.get("axis", 0) == 0 and operands[0].ndim == 1:
                picked = numbers[operands[0]]
            case "Slice" if _cuts_rows_alone(operands):
                starts, ends = operands[0], operands[1]
                step = int(operands[3][0]) if len(operands) > 3 else 1
                picked = numbers[int(starts[0]) : int(ends[0]) : step] if step > 0 else numbers[:0]
            case "Split" if attrs.get("axis", 0) == 0:
                before = sum(self._graph.expr(part).shape[0] for part in node.output[:index])
                picked = numbers[before : before + self._graph.expr(node.output[index]).shape[0]]
            case _:
                return None
        if len(picked) != self._graph.expr(node.output[index]).shape[0]:
            return None
        return RowOrigins(tuple(source.modules[i] for i in picked), tuple(source.rows[i] for i in picked))


def _whole(weight: ModuleWeight) -> RowOrigins:
    return RowOrigins((weight.module,) * weight.outputs, tuple(range(weight.outputs)))


def _joined(parts: list[RowOrigins | None]) -> RowOrigins | None:
    known = [part for part in parts if part is not None]
    if len(known) != len(parts):
        return None
    return RowOrigins(
        tuple(module for part in known for module in part.modules),
        tuple(row for part in known for row in part.rows),
    )


def _cuts_rows_alone(operands: list[Array]) -> bool:
    """Whether a Slice with these starts, ends, axes and steps cuts axis 0 and no other."""
    axes = operands[2] if len(operands) > 2 else np.arange(len(operands[0]))
    return [int(axis) for axis in axes] == [0]
