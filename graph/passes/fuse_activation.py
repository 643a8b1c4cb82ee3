"""An Activation right after a Linear becomes the Linear's epilogue."""

from __future__ import annotations

from .rewriter import CASTIRON, PassContext, Rewriter, optional_input, produced_by


def fuse_activation(rewriter: Rewriter, ctx: PassContext) -> int:
    """Set ``activation`` on Linears whose only reader is an Activation; returns how many."""
    applied = 0
    for node in list(rewriter.graph.nodes):
        if node.op != "Activation" or node.domain != CASTIRON:
            continue
        linear = produced_by(node.inputs[0], "Linear")
        if linear is None or not rewriter.read_only_by(node.inputs[0], node):
            continue
        untouched = linear.attrs.get("activation", "none") == "none" and linear.attrs.get("alpha", 1.0) == 1.0
        if untouched and optional_input(linear, 3) is None:
            linear.attrs["activation"] = node.attrs["fn"]
            rewriter.replace(node.outputs[0], linear.outputs[0])
            applied += 1
    rewriter.tidy()
    return applied
