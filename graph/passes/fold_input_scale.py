"""A scale per column of a norm's output moves into the norm's weights."""

from __future__ import annotations

from .rewriter import (
    CASTIRON,
    Node,
    PassContext,
    Rewriter,
    Tensor,
    optional_input,
    shape_of,
    weight_nodes,
)


def fold_input_scale(rewriter: Rewriter, ctx: PassContext) -> int:
    """Rewrite norm(x) · c, c a constant of one number a column, where nothing else reads the norm.

    Several products read the same scaled output where they share an input scale; where one of them has a
    scale of its own, or none, the multiplication stays. Returns how many norms were changed.
    """
    applied = 0
    for norm in list(rewriter.graph.nodes):
        if norm.domain == CASTIRON and norm.op in ("RMSNorm", "LayerNorm") and norm.outputs:
            applied += _fold(rewriter, norm)
    rewriter.tidy()
    return applied


def _fold(rewriter: Rewriter, norm: Node) -> bool:
    y = norm.outputs[0]
    readers = rewriter.consumers(y)
    width = shape_of(y)[-1]
    if len(readers) != 1 or rewriter.is_output(y) or norm.attrs.get("group", 0) not in (0, width):
        return False
    (mul,) = readers
    if mul.op != "Mul" or mul.domain or len(y.outputs) != 1 or norm.attrs.get("one_plus", 0):
        return False
    factor = mul.inputs[1] if mul.inputs[0] is y else mul.inputs[0]
    if shape_of(factor) != (width,) or not weight_nodes(factor):
        return False
    weight, bias = optional_input(norm, 1), optional_input(norm, 2)
    operands: list[Tensor | None] = [norm.inputs[0]]
    operands.append(factor if weight is None else _times(rewriter, weight, factor))
    if bias is not None:
        operands.append(_times(rewriter, bias, factor))
    attrs = dict(norm.attrs)
    output = mul.outputs[0]
    scaled = rewriter.op(norm.op, operands, shape_of(y), attrs=attrs, domain=CASTIRON, hint=output.name)
    rewriter.replace(output, scaled)
    return True


def _times(rewriter: Rewriter, weight: Tensor, factor: Tensor) -> Tensor:
    return rewriter.op(
        "Mul", [rewriter.float32(weight), factor], shape_of(weight), hint=f"{weight.name}.scaled"
    )
