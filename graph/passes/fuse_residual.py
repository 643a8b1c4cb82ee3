"""Linear + residual becomes one Linear that adds the residual as it writes its output."""

from __future__ import annotations

from .rewriter import CASTIRON, Node, PassContext, Rewriter, Tensor, optional_input, produced_by, shape_of


def fuse_residual(rewriter: Rewriter, ctx: PassContext) -> int:
    """Give Linears whose only reader is an Add the other operand as residual; returns how many.

    Where both operands are such Linears (parallel attention and MLP) the later one takes the sum.
    """
    applied = 0
    rank = {id(node): index for index, node in enumerate(rewriter.graph.nodes)}
    for node in list(rewriter.graph.nodes):
        if node.op != "Add" or node.domain or not node.outputs:
            continue
        a, b = node.inputs
        if not shape_of(a) == shape_of(b) == shape_of(node.outputs[0]) or a is b:
            continue
        candidates = [(x, r) for x, r in ((a, b), (b, a)) if _free(rewriter, node, x)]
        if not candidates:
            continue
        x, residual = max(candidates, key=lambda pair: rank.get(id(pair[0].inputs[0]), -1))
        linear = x.inputs[0]
        operands = [*linear.inputs[:2], optional_input(linear, 2), residual]
        y = rewriter.op(
            "Linear",
            operands,
            shape_of(x),
            attrs=dict(linear.attrs),
            domain=CASTIRON,
            hint=node.outputs[0].name,
        )
        rank[id(y.inputs[0])] = rank[id(node)]
        rewriter.replace(node.outputs[0], y)
        applied += 1
    rewriter.tidy()
    return applied


def _free(rewriter: Rewriter, add: Node, tensor: Tensor) -> bool:
    linear = produced_by(tensor, "Linear")
    return (
        linear is not None
        and linear.domain == CASTIRON
        and optional_input(linear, 3) is None
        and rewriter.read_only_by(tensor, add)
    )
