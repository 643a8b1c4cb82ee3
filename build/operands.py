"""The rewritten ONNX graph as the ops that tactics read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, cast

import numpy as np
import onnx

from castiron.errors import BuildError

from ..graph.weights import QuantizedParts, WeightGraph
from ..plugins import Op, Operand, Quant
from .packing_quantized import stored_dtype

#: Only small inlined constants are shown to tactics by value.
_MAX_SHOWN = 1 << 23
_INTEGERS = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)


class GraphView:
    """Shapes, constants and nodes of a model, without loading any checkpoint tensor."""

    def __init__(self, model: onnx.ModelProto, weights: WeightGraph) -> None:
        self._graph = model.graph
        self._weights = weights
        self._quants: dict[str, Quant | None] = {}
        self._shapes: dict[str, tuple[int | str, ...]] = {}
        self._types: dict[str, int] = {}
        for info in (*self._graph.input, *self._graph.value_info, *self._graph.output):
            tensor = info.type.tensor_type
            if not tensor.HasField("shape"):
                continue
            self._shapes[info.name] = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
            self._types[info.name] = tensor.elem_type
        self._initializers = {tensor.name: tensor for tensor in self._graph.initializer}
        for name, tensor in self._initializers.items():
            self._shapes[name], self._types[name] = tuple(tensor.dims), tensor.data_type
        self._constants = set(self._initializers)
        for node in self._graph.node:  # in topological order
            if all(not name or name in self._constants for name in node.input):
                self._constants.update(node.output)

    def inputs(self) -> list[Operand]:
        """The graph's inputs."""
        return [self._operand(info.name) for info in self._graph.input]

    def ops(self) -> Iterator[Op]:
        """Nodes that compute activations, in order; weight expressions are not among them."""
        for node in self._graph.node:
            if node.output[0] in self._constants:
                continue
            kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            yield Op(
                kind,
                tuple(self._operand(name) if name else None for name in node.input),
                tuple(self._operand(name) for name in node.output),
                {a.name: _attribute(a) for a in node.attribute},
            )

    def _shape(self, name: str) -> tuple[int | str, ...]:
        shape = self._shapes.get(name)
        if shape is None:
            raise BuildError(f"value {name!r} has no recorded shape, which lowering needs")
        return shape

    def _operand(self, name: str) -> Operand:
        kind = self._types.get(name, onnx.TensorProto.FLOAT)
        dtype: Literal["f32", "i32"] = "i32" if kind in _INTEGERS else "f32"
        values = None
        tensor = self._initializers.get(name)
        inline = tensor is not None and tensor.data_location != onnx.TensorProto.EXTERNAL
        if tensor is not None and inline and math.prod(tensor.dims) <= _MAX_SHOWN:
            values = np.asarray(onnx.numpy_helper.to_array(tensor))
        elif kind not in (*_INTEGERS, onnx.TensorProto.FLOAT) and name not in self._constants:
            raise BuildError(
                f"value {name!r} is of type {onnx.TensorProto.DataType.Name(kind)}; the host target computes "
                "on float32 and int32 only"
            )
        constant = name in self._constants
        quant = self._quant(name) if constant and tensor is None else None
        return Operand(name, self._shape(name), dtype, constant, values, quant)

    def _quant(self, name: str) -> Quant | None:
        if name not in self._quants:
            parts = self._weights.expr(name).parts() if self._weights.is_weight(name) else None
            self._quants[name] = None if parts is None else _described(parts)
        return self._quants[name]


def _described(parts: QuantizedParts) -> Quant:
    columns = None if parts.columns is None else tuple(int(column) for column in parts.columns)
    format = cast("Literal['int8', 'int4', 'fp8', 'fp4']", parts.format)
    return Quant(format, parts.group, stored_dtype(parts.scale), parts.offset is not None, columns)


def _attribute(attribute: onnx.AttributeProto) -> object:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value
