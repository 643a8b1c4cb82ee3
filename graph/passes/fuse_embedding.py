"""A Gather of table rows by token id or position becomes Embedding, with its scale and index offset."""

from __future__ import annotations

import onnx_graphsurgeon as gs  # type: ignore[import-untyped]

from .rewriter import (
    CASTIRON,
    Node,
    PassContext,
    Rewriter,
    Tensor,
    produced_by,
    scalar_of,
    shape_of,
    weight_nodes,
)


def fuse_embedding(rewriter: Rewriter, ctx: PassContext) -> int:
    """Rewrite Gather(table [V, H], ids + offset) · scale; returns how many Gathers became Embedding."""
    applied = 0
    for node in list(rewriter.graph.nodes):
        if node.op != "Gather" or node.domain or int(node.attrs.get("axis", 0)) != 0:
            continue
        table, indices = node.inputs
        output = node.outputs[0]
        if len(shape_of(table)) != 2 or len(shape_of(indices)) != 1 or not weight_nodes(table):
            continue
        ids, offset = _ids(indices)
        if isinstance(ids, gs.Constant) or weight_nodes(ids) or produced_by(ids, "Cast"):
            continue
        cast = produced_by(table, "Cast")
        if cast is not None:
            # Embedding reads any stored type; without the Cast a tied output projection is the same tensor.
            table = cast.inputs[0]
        scale, last = 1.0, output
        multiply = rewriter.only_consumer(output)
        if multiply is not None and (factor := _scale(multiply, output)) is not None:
            scale, last = factor, multiply.outputs[0]
        rows = rewriter.op(
            "Embedding",
            [ids, table],
            shape_of(output),
            attrs={"scale": scale, "index_offset": offset},
            domain=CASTIRON,
            hint=f"{last.name}.embedding",
        )
        rewriter.replace(last, rows)
        applied += 1
    rewriter.tidy()
    return applied


def _ids(indices: Tensor) -> tuple[Tensor, int]:
    add = produced_by(indices, "Add")
    if add is not None:
        for ids, constant in (add.inputs, add.inputs[::-1]):
            offset = scalar_of(constant)
            if offset is not None and shape_of(ids) == shape_of(indices):
                return ids, int(offset)
    return indices, 0


def _scale(node: Node, output: Tensor) -> float | None:
    if node.op != "Mul" or node.domain or shape_of(node.outputs[0]) != shape_of(output):
        return None
    other = node.inputs[1] if node.inputs[0] is output else node.inputs[0]
    return scalar_of(other)
