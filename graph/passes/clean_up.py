"""Constant folding, dead code, no-op data movement, duplicate nodes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs  # type: ignore[import-untyped]
from onnx.reference import ReferenceEvaluator
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter  # type: ignore[import-untyped]

from .rewriter import (
    CASTIRON,
    MAX_FOLDED_ELEMENTS,
    Node,
    PassContext,
    Rewriter,
    Tensor,
    dtype_name,
    ints_of,
    is_inline,
    producer,
    reshape_target,
    scalar_of,
    shape_of,
)

_SHAPE_ONLY = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Where", "Equal", "Less", "Greater")
#: op -> the scalar right operand that makes it the identity
_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0, "Pow": 1.0}


def clean_up(rewriter: Rewriter, ctx: PassContext) -> int:
    """Simplify until nothing changes; returns how many nodes were removed or replaced by simpler ones."""
    applied = 0
    while True:
        rewriter.tidy()
        changed = _merge_duplicates(rewriter)
        for node in list(rewriter.graph.nodes):
            if node.outputs and any(rule(rewriter, node) for rule in _RULES):
                changed += 1
        if not changed:
            rewriter.tidy()
            return applied
        applied += changed


def _bypass(rewriter: Rewriter, node: Node, source: Tensor) -> bool:
    rewriter.replace(node.outputs[0], source)
    node.inputs.clear()
    node.outputs.clear()
    return True


def _fold(rewriter: Rewriter, node: Node) -> bool:
    if node.op == "Constant" and not node.domain:
        value = node.attrs.get("value")
        if value is None:
            key = next(
                k for k in ("value_float", "value_int", "value_floats", "value_ints") if k in node.attrs
            )
            array = np.asarray(node.attrs[key], dtype=np.float32 if "float" in key else np.int64)
        else:
            array = np.asarray(value.values if isinstance(value, gs.Constant) else value)
        return _bypass(rewriter, node, rewriter.constant(array, node.outputs[0].name + ".value"))
    if node.op == "Shape" and not node.domain:
        dims = shape_of(node.inputs[0])[node.attrs.get("start", 0) : node.attrs.get("end")]
        if all(isinstance(d, int) for d in dims):
            return _bypass(rewriter, node, rewriter.constant([int(d) for d in dims], "shape"))
        return False
    if node.domain or not node.inputs or len(node.outputs) != 1:
        return False
    if not all(t.is_empty() or is_inline(t) for t in node.inputs):
        return False
    dims = node.outputs[0].shape or ()
    if math.prod(d for d in dims if isinstance(d, int)) > MAX_FOLDED_ELEMENTS:
        return False
    result = evaluate_node(node)
    return _bypass(rewriter, node, rewriter.constant(result, node.outputs[0].name + ".folded"))


def evaluate_node(node: Node) -> np.ndarray[Any, Any]:
    """Run one node over inlined constants with ONNX's reference evaluator."""
    names = [f"i{k}" if not t.is_empty() else "" for k, t in enumerate(node.inputs)]
    feeds = {name: np.asarray(t.values) for name, t in zip(names, node.inputs, strict=True) if name}
    proto = OnnxExporter.export_node(node)
    proto.input[:] = names
    proto.output[:] = ["o"]
    inputs = [
        onnx.helper.make_tensor_value_info(k, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for k, v in feeds.items()
    ]
    output = onnx.helper.make_tensor_value_info("o", onnx.TensorProto.UNDEFINED, None)
    model = onnx.helper.make_model(
        onnx.helper.make_graph([proto], "fold", inputs, [output]),
        opset_imports=[onnx.helper.make_opsetid("", 23)],
    )
    (result,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(result)


def _drop_identity(rewriter: Rewriter, node: Node) -> bool:
    if node.domain:
        return False
    source = node.inputs[0] if node.inputs else None
    if node.op in ("Identity", "Dropout"):
        if rewriter.is_output(node.outputs[0]) and producer(source) is None:
            return False
        return _bypass(rewriter, node, source)
    if node.op == "Cast" and dtype_name(source) == dtype_name(node.outputs[0]):
        return _bypass(rewriter, node, source)
    if node.op in _NEUTRAL and shape_of(source) == shape_of(node.outputs[0]):
        value = scalar_of(node.inputs[1])
        if value is not None and value == _NEUTRAL[node.op]:
            return _bypass(rewriter, node, source)
    if node.op in ("Add", "Mul") and shape_of(node.inputs[1]) == shape_of(node.outputs[0]):
        value = scalar_of(source)
        if value is not None and value == _NEUTRAL[node.op]:
            return _bypass(rewriter, node, node.inputs[1])
    if node.op == "Slice" and shape_of(source) == shape_of(node.outputs[0]):
        steps = ints_of(node.inputs[4]) if len(node.inputs) > 4 else [1]
        if steps is not None and all(s == 1 for s in steps):
            return _bypass(rewriter, node, source)
    if node.op == "Concat" and len(node.inputs) == 1:
        return _bypass(rewriter, node, source)
    return False


def _simplify_reshape(rewriter: Rewriter, node: Node) -> bool:
    if node.domain or node.op not in _SHAPE_ONLY:
        return False
    source, output = node.inputs[0], node.outputs[0]
    dims = shape_of(output)
    if dims == shape_of(source):
        return _bypass(rewriter, node, source)
    if sum(isinstance(d, str) for d in dims) > 1:
        return False
    inner = producer(source)
    if inner is not None and inner.op in _SHAPE_ONLY and not inner.domain:
        return _bypass(rewriter, node, rewriter.reshape(inner.inputs[0], dims, output.name + ".merged"))
    target = reshape_target(dims)
    if node.op == "Reshape" and ints_of(node.inputs[1]) == target:
        return False
    # Squeeze, Unsqueeze, Flatten and run-time shapes all become a Reshape to the recorded shape.
    return _bypass(rewriter, node, rewriter.reshape(source, dims, output.name + ".reshaped"))


def _simplify_expand(rewriter: Rewriter, node: Node) -> bool:
    if node.op != "Expand" or node.domain:
        return False
    source, output = node.inputs[0], node.outputs[0]
    if shape_of(source) == shape_of(output):
        return _bypass(rewriter, node, source)
    missing = len(shape_of(output)) - len(shape_of(source))
    if missing > 0 and shape_of(output) == (1,) * missing + shape_of(source):
        return _bypass(rewriter, node, rewriter.reshape(source, shape_of(output)))
    # Consumers that broadcast by themselves to the same result do not need the copy.
    consumers = rewriter.consumers(output)
    if rewriter.is_output(output) or not consumers:
        return False
    for consumer in consumers:
        if consumer.op not in _ELEMENTWISE or consumer.domain:
            return False
        others = [t for t in consumer.inputs if t is not output]
        if not any(shape_of(t) == shape_of(consumer.outputs[0]) for t in others):
            return False
    return _bypass(rewriter, node, source)


def _simplify_transpose(rewriter: Rewriter, node: Node) -> bool:
    if node.op != "Transpose" or node.domain:
        return False
    source, output = node.inputs[0], node.outputs[0]
    dims = shape_of(source)
    perm = list(node.attrs.get("perm", range(len(dims))[::-1]))
    if perm == sorted(perm):
        return _bypass(rewriter, node, source)
    inner = producer(source)
    if inner is not None and inner.op == "Transpose" and not inner.domain:
        inner_source = inner.inputs[0]
        inner_perm = list(inner.attrs.get("perm", range(len(dims))[::-1]))
        composed = [inner_perm[p] for p in perm]
        merged = rewriter.op(
            "Transpose", [inner_source], shape_of(output), attrs={"perm": composed}, dtype=output.dtype
        )
        return _bypass(rewriter, node, merged)
    moved = [p for p in perm if dims[p] != 1]
    if moved == sorted(moved) and sum(isinstance(d, str) for d in dims) <= 1:
        return _bypass(rewriter, node, rewriter.reshape(source, shape_of(output), output.name + ".moved"))
    return False


def _merge_duplicates(rewriter: Rewriter) -> int:
    seen: dict[object, Node] = {}
    merged = 0
    for node in list(rewriter.graph.nodes):
        if node.domain == CASTIRON and node.op in ("WriteKV", "RopeWriteKV", "PagedAttention", "Attention"):
            continue  # these have state
        key = (
            node.op,
            node.domain,
            tuple(_identity(t) for t in node.inputs),
            repr(sorted(node.attrs.items())),
            tuple(tuple(t.shape or ()) for t in node.outputs),
            tuple(dtype_name(t) for t in node.outputs),
        )
        first = seen.setdefault(key, node)
        if first is not node and not any(rewriter.is_output(t) for t in node.outputs):
            for old, new in zip(list(node.outputs), list(first.outputs), strict=True):
                rewriter.replace(old, new)
            node.inputs.clear()
            node.outputs.clear()
            merged += 1
    return merged


def _identity(tensor: Tensor) -> object:
    # Small equal constants count as the same operand: capture repeats them at every use.
    if is_inline(tensor) and math.prod(int(d) for d in shape_of(tensor)) <= 64:
        values = np.asarray(tensor.values)
        return (values.dtype.str, values.shape, values.tobytes())
    return tensor.name


_RULES = (_fold, _drop_identity, _simplify_reshape, _simplify_expand, _simplify_transpose)
