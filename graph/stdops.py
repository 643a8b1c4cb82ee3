"""The same graph in standard ONNX ops alone, so that an independent runtime can compute it.

This is the oracle form: ONNX Runtime knows nothing of castiron, so its logits are a second opinion. It is for
one sequence without a cache (positions 0 .. T-1) and for captured graphs, not for those after the passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from . import ops


def to_standard_ops(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model of opset-23 ops that computes what a captured ``model`` computes.

    Weights stay references into the checkpoint. Raises ValueError for an op of the castiron domain that only
    exists after the passes.
    """
    return _Rewriter(model).run()


class _Rewriter:
    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, TensorProto] = {}
        self._types = {t.name: t.data_type for t in model.graph.initializer}
        self._shapes = {
            v.name: [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim]
            for v in (*model.graph.value_info, *model.graph.input, *model.graph.output)
        }
        self._shapes.update((t.name, list(t.dims)) for t in model.graph.initializer)
        self._made: dict[tuple[str, ...], str] = {}

    def run(self) -> onnx.ModelProto:
        handlers: dict[str, Callable[[onnx.NodeProto, dict[str, Any]], str]] = {
            "Linear": self._linear,
            "RMSNorm": self._rms_norm,
            "Rope": self._rope,
            "Attention": self._attention,
            "Activation": self._activation,
            "ExpertLinear": self._expert_linear,
            "CombineExperts": self._combine_experts,
            "MarkPlaces": self._mark_places,
        }
        for node in self._model.graph.node:
            if node.domain != ops.DOMAIN:
                self._nodes.append(node)
                continue
            if node.op_type not in handlers:
                raise ValueError(f"{node.name}: {node.op_type} has no standard form; give a captured graph")
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
            result = handlers[node.op_type](node, attributes)
            self._nodes.append(helper.make_node("Identity", [result], list(node.output)))
        graph = helper.make_graph(
            self._nodes,
            self._model.graph.name,
            self._model.graph.input,
            self._model.graph.output,
            initializer=[*self._model.graph.initializer, *self._constants.values()],
        )
        imports = [helper.make_opsetid("", ops.OPSET)]
        return helper.make_model(graph, opset_imports=imports, ir_version=self._model.ir_version)

    # -- building blocks -------------------------------------------------------------------------------------

    def _add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"std.{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def _constant(self, value: Any, dtype: Any) -> str:
        array = np.array(value, dtype)
        name = f"std.constant.{array.dtype.name}.{array.tolist()}"
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def _float(self, value: float) -> str:
        return self._constant(value, np.float32)

    def _ints(self, *values: int) -> str:
        return self._constant(values, np.int64)

    def _weight(self, name: str) -> str:
        """An operand in float32; checkpoint tensors may be stored narrower."""
        if self._types.get(name, TensorProto.FLOAT) == TensorProto.FLOAT:
            return name
        return self._once(("cast", name), lambda: self._add("Cast", [name], to=TensorProto.FLOAT))

    def _once(self, key: tuple[str, ...], make: Callable[[], str]) -> str:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # -- ops -------------------------------------------------------------------------------------------------

    def _linear(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> str:
        weight = self._add("Transpose", [self._weight(node.input[1])], perm=[1, 0])
        y = self._add("MatMul", [node.input[0], weight])
        return self._add("Add", [y, self._weight(node.input[2])]) if len(node.input) > 2 else y

    def _expert_linear(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> str:
        x, ids, weight = node.input[:3]
        experts, inputs = attributes["experts"], int(self._shapes[weight][1])
        outputs = int(self._shapes[weight][0]) // experts
        stack = self._add("Reshape", [self._weight(weight), self._ints(experts, outputs, inputs)])
        picked = self._add("Gather", [stack, ids], axis=0)  # [T, k, N, K]
        if len(self._shapes[x]) == 2:
            x = self._add("Unsqueeze", [x, self._ints(1)])
        column = self._add("Unsqueeze", [x, self._ints(3)])
        y = self._add("Squeeze", [self._add("MatMul", [picked, column]), self._ints(3)])
        if len(node.input) < 4:
            return y
        biases = self._add("Reshape", [self._weight(node.input[3]), self._ints(experts, outputs)])
        return self._add("Add", [y, self._add("Gather", [biases, ids], axis=0)])

    def _combine_experts(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> str:
        y, weights = node.input
        weighted = self._add("Mul", [y, self._add("Unsqueeze", [weights, self._ints(2)])])
        return self._add("ReduceSum", [weighted, self._ints(1)], keepdims=0)

    def _mark_places(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> str:
        bounds = self._constant([0.0, 1.0], np.float32)
        marks = self._add("OneHot", [node.input[0], self._ints(attributes["width"]), bounds], axis=-1)
        return self._add("ReduceMax", [marks, self._ints(-2)], keepdims=0)

    def _rms_norm(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> str:
        if len(node.input) > 1:
            weight = self._weight(node.input[1])
            if attributes["one_plus"]:
                weight = self._add("Add", [weight, self._float(1.0)])
        else:
            weight = self._constant(np.ones(self._shapes[node.input[0]][-1]), np.float32)
        return self._add("RMSNormalization", [node.input[0], weight], axis=-1, epsilon=attributes["eps"])

    def _rope(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> str:
        x, cos, sin = node.input
        cos, sin = (self._half(table, attributes["cos_layout"]) for table in (cos, sin))
        rotary = 2 * self._half_width(node.input[1], attributes["cos_layout"])
        width = int(self._shapes[x][-1])
        style = attributes["style"]
        if style == "concat_halves":
            # Even entries, then odd ones; after that the rotation is the one of halves.
            order = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, width)]
            x = self._add("Gather", [x, self._ints(*order)], axis=-1)
        options: dict[str, Any] = {"interleaved": int(style == "interleaved")}
        if rotary != width:
            options["rotary_embedding_dim"] = rotary
        return self._add("RotaryEmbedding", [x, cos, sin], **options)

    def _half_width(self, table: str, layout: str) -> int:
        width = int(self._shapes[table][-1])
        return width if layout == "half" else width // 2

    def _half(self, table: str, layout: str) -> str:
        if layout == "half":
            return table
        width = int(self._shapes[table][-1])
        start, stop, step = (0, width // 2, 1) if layout == "repeat_block" else (0, width, 2)
        operands = [table, self._ints(start), self._ints(stop), self._ints(-1), self._ints(step)]
        return self._once(("half", table, layout), lambda: self._add("Slice", operands))

    def _attention(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> str:
        q, k, v = node.input[:3]
        slopes = node.input[4] if len(node.input) > 4 else ""
        if len(node.input) > 3 and node.input[3]:
            raise ValueError(f"{node.name}: attention sinks have no form in opset {ops.OPSET}")
        operands = [q, k, v]
        bias = self._bias(attributes["window"], attributes["chunk"], slopes)
        if bias:
            operands.append(bias)
        options = {"scale": attributes["scale"], "softcap": attributes["softcap"], "is_causal": 1}
        output = self._add("Attention", operands, **options)
        return self._add("Transpose", [output], perm=[0, 2, 1, 3])

    def _bias(self, window: int, chunk: int, slopes: str) -> str:
        """What is added to the scores besides causality, [T, T] or [1, Hq, T, T]; "" for nothing."""
        if not (window or chunk or slopes):
            return ""
        positions = ops.POSITIONS

        def distance() -> str:
            rows = self._add("Unsqueeze", [positions, self._ints(1)])
            return self._add("Sub", [rows, self._add("Unsqueeze", [positions, self._ints(0)])])

        distances = self._once(("distance",), distance)
        result = ""
        if window or chunk:
            result = self._once(
                ("mask", str(window), str(chunk)), lambda: self._mask(distances, window, chunk)
            )
        if slopes:
            steps = self._add("Neg", [self._add("Cast", [distances], to=TensorProto.FLOAT)])
            heads = self._add("Reshape", [self._weight(slopes), self._ints(1, -1, 1, 1)])
            lines = self._add("Mul", [heads, steps])
            result = self._add("Add", [lines, result]) if result else lines
        return result

    def _mask(self, distances: str, window: int, chunk: int) -> str:
        masks = []
        if window:
            masks.append(self._add("Less", [distances, self._constant(window, np.int64)]))
        if chunk:
            chunks = self._add("Div", [ops.POSITIONS, self._constant(chunk, np.int64)])
            pair = [self._add("Unsqueeze", [chunks, self._ints(axis)]) for axis in (1, 0)]
            masks.append(self._add("Equal", pair))
        visible = masks[0] if len(masks) == 1 else self._add("And", masks)
        return self._add("Where", [visible, self._float(0.0), self._float(-math.inf)])

    def _activation(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> str:
        (x,) = node.input
        fn = attributes["fn"]
        if fn == "silu":
            return self._add("Mul", [x, self._add("Sigmoid", [x])])
        if fn == "gelu_quick":
            scaled = self._add("Mul", [x, self._float(1.702)])
            return self._add("Mul", [x, self._add("Sigmoid", [scaled])])
        if fn == "relu2":
            positive = self._add("Relu", [x])
            return self._add("Mul", [positive, positive])
        if fn in ("gelu_tanh", "gelu_erf"):
            return self._add("Gelu", [x], approximate="tanh" if fn == "gelu_tanh" else "none")
        return self._add({"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid"}[fn], [x])
