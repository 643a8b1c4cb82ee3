"""Rotation of the first columns of each head, with the rest passed through, becomes one partial Rope."""

from __future__ import annotations

from .rewriter import CASTIRON, PassContext, Rewriter, last_axis_range, produced_by, shape_of


def fold_partial_rope(rewriter: Rewriter, ctx: PassContext) -> int:
    """Rewrite Concat(Rope(x[.., :r]), x[.., r:]) to Rope(x), whose cos and sin are narrower than x."""
    applied = 0
    for node in list(rewriter.graph.nodes):
        if node.op != "Concat" or node.domain or len(node.inputs) != 2:
            continue
        if node.attrs.get("axis") not in (-1, len(shape_of(node.outputs[0])) - 1):
            continue
        rope = produced_by(node.inputs[0], "Rope")
        passed = last_axis_range(node.inputs[1])
        rotated = last_axis_range(rope.inputs[0]) if rope is not None else None
        if rope is None or passed is None or rotated is None or passed[0] is not rotated[0]:
            continue
        source = rotated[0]
        width = shape_of(source)[-1]
        if rotated[1] != 0 or rotated[2] != passed[1] or passed[2] != width:
            continue
        whole = rewriter.op(
            "Rope",
            [source, rope.inputs[1], rope.inputs[2]],
            shape_of(source),
            attrs=dict(rope.attrs),
            domain=CASTIRON,
            hint=f"{node.outputs[0].name}.partial",
        )
        rewriter.replace(node.outputs[0], whole)
        applied += 1
    rewriter.tidy()
    return applied
