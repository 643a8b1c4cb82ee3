"""What depends on ``positions`` alone (rotary cos and sin, position scales) becomes a table and a Gather."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs  # type: ignore[import-untyped]
from onnx.reference import ReferenceEvaluator
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter  # type: ignore[import-untyped]

from castiron.errors import BuildError

from .rewriter import Node, PassContext, Rewriter, Tensor, is_external, producer, shape_of

_FLOATS = ("float32", "float64", "float16")


def tabulate_positions(rewriter: Rewriter, ctx: PassContext) -> int:
    """Replace every value computed from ``positions`` and inlined constants; returns how many tables it made.

    The table has a row per position 0 .. max_seq_len - 1. A value qualifies only if its row for a token
    depends on that token's position alone, which is checked by evaluating it on permuted positions too.
    """
    positions = next((t for t in rewriter.graph.inputs if t.name == "positions"), None)
    if positions is None:
        raise BuildError("the graph has no input 'positions'")
    rewriter.tidy()
    dependent = _dependent_values(rewriter, positions)
    frontier = [t for t in dependent if _is_frontier(rewriter, t, dependent) and not _is_table(t, positions)]
    count = 0
    for value in frontier:
        if np.dtype(value.dtype).name in _FLOATS and _tabulate(rewriter, ctx, positions, value):
            count += 1
    rewriter.tidy()
    return count


def _dependent_values(rewriter: Rewriter, positions: Tensor) -> list[Tensor]:
    dependent: dict[int, Tensor] = {id(positions): positions}
    for node in rewriter.graph.nodes:
        operands = [t for t in node.inputs if not t.is_empty()]
        if node.domain or any(is_external(t) for t in operands):
            continue
        variable = [t for t in operands if not isinstance(t, gs.Constant)]
        if variable and all(id(t) in dependent for t in variable):
            dependent.update((id(t), t) for t in node.outputs)
    return list(dependent.values())[1:]


def _is_frontier(rewriter: Rewriter, value: Tensor, dependent: list[Tensor]) -> bool:
    inside = {id(t) for t in dependent}
    return rewriter.is_output(value) or any(
        any(id(t) not in inside for t in node.outputs) for node in rewriter.consumers(value)
    )


def _is_table(value: Tensor, positions: Tensor) -> bool:
    # Already in the form that this pass makes: Reshape*(Gather(constant, positions)).
    node = producer(value)
    while node is not None and node.op == "Reshape":
        node = producer(node.inputs[0])
    return node is not None and node.op == "Gather" and node.inputs[1] is positions


def _tabulate(rewriter: Rewriter, ctx: PassContext, positions: Tensor, value: Tensor) -> bool:
    dims = shape_of(value)
    if sum(d == "T" for d in dims) != 1 or any(isinstance(d, str) and d != "T" for d in dims):
        return False
    axis = dims.index("T")
    every = np.arange(ctx.max_seq_len, dtype=np.int64)
    table = _rows(rewriter, value, every, axis)
    shuffled = np.random.default_rng(0).permutation(every)[: min(64, len(every))]
    if not np.array_equal(_rows(rewriter, value, shuffled, axis), table[shuffled], equal_nan=True):
        return False
    rest = [int(d) for i, d in enumerate(dims) if i != axis]
    width = math.prod(rest)
    constant = rewriter.constant(table.reshape(len(every), width).astype(np.float32), f"{value.name}.table")
    rows = rewriter.op(
        "Gather", [constant, positions], ["T", width], attrs={"axis": 0}, hint=f"{value.name}.rows"
    )
    result = rewriter.reshape(rows, ["T", *rest])
    if any(d != 1 for d in rest[:axis]):
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(dims))]
        result = rewriter.op("Transpose", [result], dims, attrs={"perm": order})
    else:
        result = rewriter.reshape(rows, dims)
    rewriter.replace(value, result)
    return True


def _rows(
    rewriter: Rewriter, value: Tensor, positions: np.ndarray[Any, Any], axis: int
) -> np.ndarray[Any, Any]:
    """The value for given positions, token axis first."""
    model = _submodel(rewriter, value)
    (result,) = ReferenceEvaluator(model).run(None, {"positions": positions})
    moved = np.moveaxis(np.asarray(result), axis, 0)
    if moved.shape[0] != len(positions):
        raise BuildError(f"{value.name!r} has {moved.shape[0]} rows for {len(positions)} positions")
    return moved


def _submodel(rewriter: Rewriter, value: Tensor) -> onnx.ModelProto:
    needed: set[int] = set()
    stack = [value]
    while stack:
        node = producer(stack.pop())
        if node is not None and id(node) not in needed:
            needed.add(id(node))
            stack.extend(node.inputs)
    nodes: list[Node] = [node for node in rewriter.graph.nodes if id(node) in needed]
    protos, initializers = [], {}
    for node in nodes:
        for tensor in node.inputs:
            if isinstance(tensor, gs.Constant):
                initializers[tensor.name] = onnx.numpy_helper.from_array(
                    np.asarray(tensor.values), tensor.name
                )
        protos.append(OnnxExporter.export_node(node))
    position_info = onnx.helper.make_tensor_value_info("positions", onnx.TensorProto.INT64, ["T"])
    output = onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.UNDEFINED, None)
    graph = onnx.helper.make_graph(
        protos, "positions", [position_info], [output], list(initializers.values())
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])
