"""From the tree of a quantized parameter to nodes of the graph, and to a weight expression."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from ... import ops
from ...weights import WeightExpr, WeightGraph
from ..safetensors_file import TensorInfo
from .expression import Value


class NodeMaker:
    """Collects the nodes and initializers of values; what occurs twice is made once.

    ``unique`` turns a wish for a name into a name that nothing else has.
    """

    def __init__(self, unique: Callable[[str], str]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.value_infos: list[onnx.ValueInfoProto] = []
        self._unique = unique
        self._stored: dict[str, str] = {}
        self._constants: dict[tuple[object, ...], str] = {}
        self._made: dict[int, str] = {}
        self._kept: list[Value] = []  # ids stay taken while the values live

    def make(self, value: Value, name: str = "") -> str:
        """The ONNX name of a value; a node's output is called ``name`` if one is given."""
        if value.tensor is not None:
            return self._leaf(value.tensor)
        if value.array is not None:
            return self.constant(value.array)
        if id(value) not in self._made:
            inputs = [self.make(operand) for operand in value.inputs]
            output = name or self._unique(f"{next(value.tensors()).name}.{value.op.lower()}")
            attributes = dict(value.attributes)
            node = helper.make_node(value.op, inputs, [output], output, domain=value.domain, **attributes)
            self.nodes.append(node)
            self.value_infos.append(
                helper.make_tensor_value_info(
                    output, helper.np_dtype_to_tensor_dtype(value.dtype), list(value.shape)
                )
            )
            self._made[id(value)] = output
            self._kept.append(value)
        return self._made[id(value)]

    def constant(self, array: npt.NDArray[Any]) -> str:
        """The name of an inlined array."""
        key = (array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest())
        if key not in self._constants:
            name = self._unique("quantized.constant")
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
            self._constants[key] = name
        return self._constants[key]

    def _leaf(self, stored: TensorInfo) -> str:
        if stored.name not in self._stored:
            name = self._unique(stored.name)
            tensor = TensorProto(name=name, dims=stored.shape, data_location=TensorProto.EXTERNAL)
            tensor.data_type = helper.np_dtype_to_tensor_dtype(stored.dtype)
            place = {"location": stored.file, "offset": stored.offset, "length": stored.nbytes}
            for key, entry in place.items():
                tensor.external_data.add(key=key, value=str(entry))
            self.initializers.append(tensor)
            self._stored[stored.name] = name
        return self._stored[stored.name]


def weight_expr(value: Value) -> WeightExpr:
    """The value as rows that are made on demand, by the rules that packing uses."""
    taken: set[str] = set()

    def unique(wish: str) -> str:
        name = wish if wish not in taken else f"{wish}_{len(taken)}"
        taken.add(name)
        return name

    maker = NodeMaker(unique)
    output = maker.make(value)
    graph = helper.make_graph(
        maker.nodes, "weight", [], [onnx.ValueInfoProto(name=output)], maker.initializers
    )
    opsets = [helper.make_opsetid("", ops.OPSET), helper.make_opsetid(ops.DOMAIN, ops.DOMAIN_VERSION)]
    return WeightGraph(helper.make_model(graph, opset_imports=opsets)).expr(output)
