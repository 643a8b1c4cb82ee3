"""Quantized parameters enter a captured graph: nodes in place of the float32 tensors that stood for them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from ... import ops
from .expression import Value, float32
from .tensor import MadeTensor
from .to_nodes import NodeMaker, weight_expr


def expand(model: onnx.ModelProto, quantized: Mapping[str, MadeTensor]) -> frozenset[str]:
    """Replace every initializer that is named in ``quantized`` by the nodes that make its value.

    The value keeps its name. A product with an input scale multiplies x by it and takes the weight without
    it; any other use gets the weight with the scale in its columns. Returns the names replaced.
    """
    graph = model.graph
    present = [tensor.name for tensor in graph.initializer if tensor.name in quantized]
    names = _Names(model)
    maker = NodeMaker(names.unique)
    scaled = _ScaledInputs(model, maker, names)
    for name in present:
        tensor = quantized[name]
        products = [node for node in graph.node if _is_product(node, name)]
        if tensor.input_scale is None:
            maker.make(tensor.weight, name)
            continue
        others = any(name in node.input for node in graph.node if node not in products)
        weight = maker.make(tensor.weight, names.unique(f"{name}.unscaled") if others else name)
        if others:
            maker.make(tensor.value, name)
        for node in products:
            node.input[0] = scaled.by(node.input[0], tensor.input_scale)
            node.input[1] = weight
    replaced = frozenset(present)
    kept = [tensor for tensor in graph.initializer if tensor.name not in replaced]
    del graph.initializer[:]
    graph.initializer.extend([*kept, *maker.initializers])
    graph.value_info.extend(maker.value_infos)
    nodes = [*maker.nodes, *scaled.placed()]
    del graph.node[:]
    graph.node.extend(nodes)
    return replaced


def _is_product(node: onnx.NodeProto, weight: str) -> bool:
    return node.domain == ops.DOMAIN and node.op_type == "Linear" and node.input[1] == weight


class _Names:
    """Names that nothing in a graph has."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self._taken = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
        for node in graph.node:
            self._taken.update((node.name, *node.output))

    def unique(self, wish: str) -> str:
        name, number = wish, 1
        while name in self._taken:
            name, number = f"{wish}_{number}", number + 1
        self._taken.add(name)
        return name


class _ScaledInputs:
    """x times a scale for each input: once for all products that read the same x under equal scales.

    Projections of one input are stored with a copy of the scale each; one product of the copies keeps them
    together for the passes that fuse such projections.
    """

    def __init__(self, model: onnx.ModelProto, maker: NodeMaker, names: _Names) -> None:
        self._model, self._maker, self._names = model, maker, names
        self._scales: dict[bytes, str] = {}
        self._made: dict[tuple[str, str], onnx.NodeProto] = {}
        self._shapes = {value.name: value for value in model.graph.value_info}

    def by(self, x: str, scale: Value) -> str:
        """The name of x times the scale."""
        key = weight_expr(scale).whole().tobytes()
        if key not in self._scales:
            self._scales[key] = self._maker.make(float32(scale))
        pair = (x, self._scales[key])
        if pair not in self._made:
            name = self._names.unique(f"{x}.scaled")
            self._made[pair] = helper.make_node("Mul", list(pair), [name], name)
            info = onnx.ValueInfoProto()
            info.CopyFrom(self._shapes[x])
            info.name = name
            self._model.graph.value_info.append(info)
        return str(self._made[pair].output[0])

    def placed(self) -> list[onnx.NodeProto]:
        """The graph's nodes with each multiplication in front of its first reader."""
        waiting = {str(node.output[0]): node for node in self._made.values()}
        placed: list[onnx.NodeProto] = []
        for node in self._model.graph.node:
            placed.extend(waiting.pop(name) for name in node.input if name in waiting)
            placed.append(node)
        return placed
