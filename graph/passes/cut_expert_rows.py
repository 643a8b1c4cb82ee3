"""Strided slices of an ExpertLinear's outputs become products of their own.

gpt-oss stores gate and up as every other row of one matrix and clamps both, so that they cannot be fused with
their activation; slices of the outputs would be copied.
"""

from __future__ import annotations

from .rewriter import (
    CASTIRON,
    Node,
    PassContext,
    Rewriter,
    Tensor,
    ints_of,
    optional_input,
    produced_by,
    rounding_of,
    shape_of,
)


def cut_expert_rows(rewriter: Rewriter, ctx: PassContext) -> int:
    """Rewrite strided slices of the outputs of an ExpertLinear that only slices read; returns how many."""
    applied = 0
    for node in list(rewriter.graph.nodes):
        if node.op == "Slice" and not node.domain and node.outputs and _cut(rewriter, node):
            applied += 1
    rewriter.tidy()
    return applied


def _cut(rewriter: Rewriter, node: Node) -> bool:
    source = node.inputs[0]
    linear = produced_by(source, "ExpertLinear")
    given = [ints_of(tensor) for tensor in node.inputs[1:]]
    bounds = [values[0] for values in given if values is not None and len(values) == 1]
    if linear is None or len(bounds) != 4 or any(user.op != "Slice" for user in source.outputs):
        return False
    start, _, axis, step = bounds
    if axis not in (-1, 2) or step < 2 or start < 0:
        return False
    output = node.outputs[0]
    experts, count = int(linear.attrs["experts"]), int(shape_of(output)[-1])

    def rows(tensor: Tensor) -> Tensor:
        return rewriter.pick_rows(tensor, experts, start, count, step)

    bias = optional_input(linear, 3)
    y = rewriter.op(
        "ExpertLinear",
        [*linear.inputs[:2], rows(linear.inputs[2]), None if bias is None else rows(bias)],
        shape_of(output),
        attrs={"experts": experts, **rounding_of(linear)},
        domain=CASTIRON,
        hint=output.name,
    )
    rewriter.replace(output, y)
    return True
