"""The source model's batch dimension, always one, goes: activations become packed rows [T, ...]."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs  # type: ignore[import-untyped]

from .rewriter import (
    CASTIRON,
    Node,
    PassContext,
    Rewriter,
    Tensor,
    ints_of,
    is_inline,
    shape_of,
    weight_nodes,
)

_ROWWISE = {"Linear", "RMSNorm", "LayerNorm", "Activation"}
_UNARY = {
    "Neg",
    "Exp",
    "Log",
    "Sqrt",
    "Abs",
    "Reciprocal",
    "Softplus",
    "Sin",
    "Cos",
    "Erf",
    "Clip",
    "Cast",
    "Floor",
}
_BINARY = {"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Where"}
_AXIS = {"Concat", "Softmax", "Split"}
_REDUCE = {"ReduceMean", "ReduceSum", "ReduceMax"}


def drop_batch(rewriter: Rewriter, ctx: PassContext) -> int:
    """Rewrite ops on [1, ...] to work on [...]; returns how many. Others get a Reshape on each side."""
    applied = 0
    while True:
        rewriter.tidy()
        changed = sum(_drop(rewriter, node) for node in list(rewriter.graph.nodes))
        _merge_reshapes(rewriter)
        rewriter.tidy()
        if not changed:
            return applied
        applied += changed


def _drop(rewriter: Rewriter, node: Node) -> bool:
    rule = _RULES.get(node.op)
    if rule is None or node.domain not in (None, "", CASTIRON) or not node.outputs:
        return False
    output = node.outputs[0]
    if len(shape_of(output)) < 2 or shape_of(output)[0] != 1 or weight_nodes(output):
        return False
    return rule(rewriter, node)


def _squeezed(rewriter: Rewriter, tensor: Tensor) -> Tensor:
    """``tensor`` of shape [1, ...] without the leading one."""
    if is_inline(tensor):
        return rewriter.constant(np.asarray(tensor.values).reshape(shape_of(tensor)[1:]), tensor.name)
    return rewriter.reshape(tensor, shape_of(tensor)[1:], f"{tensor.name}.rows")


def _emit(rewriter: Rewriter, node: Node, inputs: list[Tensor], changed: dict[str, object]) -> bool:
    attrs = {**node.attrs, **changed}
    shapes = [shape_of(t)[1:] for t in node.outputs]
    fresh = rewriter.op_n(
        node.op,
        inputs,
        shapes,
        attrs=attrs,
        domain=node.domain or "",
        dtype=node.outputs[0].dtype,
        hint=f"{node.outputs[0].name}.rows",
    )
    for old, new in zip(list(node.outputs), fresh, strict=True):
        rewriter.replace(old, rewriter.reshape(new, shape_of(old), f"{old.name}.batch"))
    return True


def _first_operand(rewriter: Rewriter, node: Node) -> bool:
    return _emit(rewriter, node, [_squeezed(rewriter, node.inputs[0]), *node.inputs[1:]], {})


def _binary(rewriter: Rewriter, node: Node) -> bool:
    rank = len(shape_of(node.outputs[0]))
    if any(len(shape_of(t)) == rank and shape_of(t)[0] != 1 for t in node.inputs):
        return False
    operands = [_squeezed(rewriter, t) if len(shape_of(t)) == rank else t for t in node.inputs]
    return _emit(rewriter, node, operands, {})


def _moved_axis(node: Node, default: int) -> int | None:
    """The axis counted in the input without its leading one; None where it is that one."""
    rank = len(shape_of(node.inputs[0]))
    axis = int(node.attrs.get("axis", default)) % rank
    return None if axis == 0 else axis - 1


def _axis(rewriter: Rewriter, node: Node) -> bool:
    axis = _moved_axis(node, 0 if node.op == "Split" else -1)
    if axis is None:
        return False
    if node.op == "Concat":
        inputs = [_squeezed(rewriter, t) for t in node.inputs]
    else:
        inputs = [_squeezed(rewriter, node.inputs[0]), *node.inputs[1:]]
    return _emit(rewriter, node, inputs, {"axis": axis})


def _gather(rewriter: Rewriter, node: Node) -> bool:
    data, indices = node.inputs
    axis = int(node.attrs.get("axis", 0)) % len(shape_of(data))
    if axis > 0 and shape_of(data)[0] == 1:
        return _emit(rewriter, node, [_squeezed(rewriter, data), indices], {"axis": axis - 1})
    if axis == 0 and len(shape_of(indices)) > 1 and shape_of(indices)[0] == 1:
        return _emit(rewriter, node, [data, _squeezed(rewriter, indices)], {})
    return False


def _slice(rewriter: Rewriter, node: Node) -> bool:
    if len(node.inputs) < 4:
        return False
    axes = ints_of(node.inputs[3])
    rank = len(shape_of(node.inputs[0]))
    if axes is None or any(axis % rank == 0 for axis in axes):
        return False
    moved = rewriter.constant([axis % rank - 1 for axis in axes], "axes")
    inputs = [_squeezed(rewriter, node.inputs[0]), *node.inputs[1:3], moved, *node.inputs[4:]]
    return _emit(rewriter, node, inputs, {})


def _reduce(rewriter: Rewriter, node: Node) -> bool:
    axes = ints_of(node.inputs[1]) if len(node.inputs) > 1 else None
    rank = len(shape_of(node.inputs[0]))
    if axes is None or any(axis % rank == 0 for axis in axes):
        return False
    moved = rewriter.constant([axis % rank - 1 for axis in axes], "axes")
    return _emit(rewriter, node, [_squeezed(rewriter, node.inputs[0]), moved], {})


def _transpose(rewriter: Rewriter, node: Node) -> bool:
    perm = list(node.attrs["perm"])
    if perm[0] != 0:
        return False
    return _emit(rewriter, node, [_squeezed(rewriter, node.inputs[0])], {"perm": [p - 1 for p in perm[1:]]})


def _matmul(rewriter: Rewriter, node: Node) -> bool:
    a, b = node.inputs
    rank = len(shape_of(node.outputs[0]))
    if rank < 3 or len(shape_of(a)) != rank or shape_of(a)[0] != 1:
        return False
    if len(shape_of(b)) == rank:
        b = _squeezed(rewriter, b)
    return _emit(rewriter, node, [_squeezed(rewriter, a), b], {})


def _merge_reshapes(rewriter: Rewriter) -> None:
    """Cancel the Reshapes that the rules put between neighbours."""
    for node in list(rewriter.graph.nodes):
        if node.op != "Reshape" or not node.outputs:
            continue
        output, source = node.outputs[0], node.inputs[0]
        inner = source.inputs[0] if source.inputs else None
        while inner is not None and inner.op == "Reshape" and not isinstance(source, gs.Constant):
            source = inner.inputs[0]
            inner = source.inputs[0] if source.inputs else None
        if source is not node.inputs[0]:
            rewriter.replace(output, rewriter.reshape(source, shape_of(output), output.name))


_RULES: dict[str, Callable[[Rewriter, Node], bool]] = {
    **dict.fromkeys(_ROWWISE | _UNARY, _first_operand),
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_AXIS, _axis),
    **dict.fromkeys(_REDUCE, _reduce),
    "Gather": _gather,
    "Slice": _slice,
    "Transpose": _transpose,
    "MatMul": _matmul,
}
