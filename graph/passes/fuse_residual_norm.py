"""An Add that no Linear took, followed by a norm, becomes one op with two outputs."""

from __future__ import annotations

from .rewriter import CASTIRON, PassContext, Rewriter, optional_input, shape_of


def fuse_residual_norm(rewriter: Rewriter, ctx: PassContext) -> int:
    """Rewrite Add + RMSNorm or LayerNorm to AddRMSNorm or AddLayerNorm; returns how many."""
    applied = 0
    for node in list(rewriter.graph.nodes):
        if node.op != "Add" or node.domain or not node.outputs:
            continue
        total = node.outputs[0]
        if (
            not shape_of(node.inputs[0]) == shape_of(node.inputs[1]) == shape_of(total)
            or len(shape_of(total)) != 2
        ):
            continue
        norms = [
            n
            for n in rewriter.consumers(total)
            if n.op in ("RMSNorm", "LayerNorm") and n.domain == CASTIRON and n.attrs.get("group", 0) == 0
        ]
        if not norms:
            continue
        norm = norms[0]
        weights = [optional_input(norm, i) for i in (1, 2)]
        attrs = {name: norm.attrs[name] for name in ("eps", "one_plus") if name in norm.attrs}
        y, summed = rewriter.op_n(
            f"Add{norm.op}",
            [*node.inputs, *weights],
            [shape_of(total), shape_of(total)],
            attrs=attrs,
            domain=CASTIRON,
            hint=f"{total.name}.normed",
        )
        rewriter.replace(norm.outputs[0], y)
        rewriter.replace(total, summed)
        applied += 1
    rewriter.tidy()
    return applied
