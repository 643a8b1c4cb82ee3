"""A Linear's output times a number becomes the Linear's ``alpha``."""

from __future__ import annotations

import math

from .rewriter import PassContext, Rewriter, optional_input, produced_by, scalar_of, shape_of


def fuse_scale(rewriter: Rewriter, ctx: PassContext) -> int:
    """Fold Mul by a scalar, and Div by a power of two (whose reciprocal is exact); returns how many.

    Any other division stays: x / c and x · (1 / c) round differently.
    """
    applied = 0
    for node in list(rewriter.graph.nodes):
        if node.op not in ("Mul", "Div") or node.domain or not node.outputs:
            continue
        for index, x in enumerate(node.inputs if node.op == "Mul" else node.inputs[:1]):
            linear = produced_by(x, "Linear")
            factor = scalar_of(node.inputs[1 - index])
            if linear is None or factor is None or not rewriter.read_only_by(x, node):
                continue
            if optional_input(linear, 3) is not None or linear.attrs.get("alpha", 1.0) != 1.0:
                continue
            if shape_of(x) != shape_of(node.outputs[0]):
                continue
            if node.op == "Div":
                if factor == 0 or abs(math.frexp(factor)[0]) != 0.5:
                    continue
                factor = 1.0 / factor
            linear.attrs["alpha"] = factor
            rewriter.replace(node.outputs[0], x)
            applied += 1
            break
    rewriter.tidy()
    return applied
