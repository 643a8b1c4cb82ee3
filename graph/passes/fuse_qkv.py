"""The query, key and value projections of one attention become one Linear over concatenated weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .rewriter import (
    CASTIRON,
    Node,
    PassContext,
    Rewriter,
    Tensor,
    codes_of,
    dtype_name,
    optional_input,
    producer,
    rounding_of,
    shape_of,
)

_PASS_THROUGH = ("RMSNorm", "LayerNorm", "PagedRope", "Clip", "Reshape", "Mul", "Div")


def fuse_qkv(rewriter: Rewriter, ctx: PassContext) -> int:
    """Join sibling Linears that feed one attention's q, k and v; returns how many attentions were changed.

    The joined output is cut into column slices, which lowering makes views. Row order of the weight:
    q, k, v as far as they read the same x.
    """
    applied = 0
    for write in list(rewriter.graph.nodes):
        if write.op not in ("RopeWriteKV", "WriteKV") or write.domain != CASTIRON:
            continue
        linears: list[Node] = []
        for tensor in _sources(rewriter, write):
            linear = _linear_behind(tensor)
            if linear is not None and not any(linear is other for other in linears):
                linears.append(linear)
        siblings = [n for n in linears if _alike(n, linears[0])]
        if len(siblings) > 1 and all(_plain(rewriter, n) for n in siblings):
            _join(rewriter, siblings)
            applied += 1
    rewriter.tidy()
    return applied


def _alike(node: Node, first: Node) -> bool:
    """Whether both products read the same x, round it in the same way and have weights held alike.

    One matrix of mixed codes would have to be packed as the numbers that they stand for.
    """
    return (
        node.inputs[0] is first.inputs[0]
        and rounding_of(node) == rounding_of(first)
        and codes_of(node.inputs[1]) == codes_of(first.inputs[1])
    )


def _sources(rewriter: Rewriter, write: Node) -> list[Tensor]:
    if write.op == "RopeWriteKV":
        return list(write.inputs[:3])
    queries = [n.inputs[0] for n in rewriter.consumers(write.outputs[0]) if n.op == "PagedAttention"]
    return [*queries[:1], *write.inputs[:2]]


def _linear_behind(tensor: Tensor) -> Node | None:
    node = producer(tensor)
    while node is not None and node.op in _PASS_THROUGH:
        node = producer(node.inputs[0])
    return node if node is not None and node.op == "Linear" and node.domain == CASTIRON else None


def _plain(rewriter: Rewriter, node: Node) -> bool:
    return (
        optional_input(node, 3) is None
        and node.attrs.get("activation", "none") == "none"
        and node.attrs.get("alpha", 1.0) == 1.0
        and not rewriter.is_output(node.outputs[0])
    )


def _join(rewriter: Rewriter, linears: list[Node]) -> None:
    x = linears[0].inputs[0]
    widths = [int(shape_of(n.inputs[1])[0]) for n in linears]
    features = shape_of(linears[0].inputs[1])[1]
    name = "+".join([linears[0].inputs[1].name, *(n.inputs[1].name.split(".")[-2] for n in linears[1:])])
    weight = rewriter.op(
        "Concat",
        [n.inputs[1] for n in linears],
        [sum(widths), features],
        attrs={"axis": 0},
        dtype=linears[0].inputs[1].dtype,
        hint=name,
    )
    biases = [optional_input(n, 2) for n in linears]
    bias = None
    if any(b is not None for b in biases):
        present = next(b for b in biases if b is not None)
        kind = np.dtype(ml_dtypes.bfloat16) if dtype_name(present) == "bfloat16" else present.dtype
        parts = [
            rewriter.constant(np.zeros(width, kind), "no_bias") if b is None else b
            for b, width in zip(biases, widths, strict=True)
        ]
        bias = rewriter.op(
            "Concat", parts, [sum(widths)], attrs={"axis": 0}, dtype=present.dtype, hint=f"{name}.bias"
        )
    rows = shape_of(linears[0].outputs[0])[0]
    joined = rewriter.op(
        "Linear",
        [x, weight, bias],
        [rows, sum(widths)],
        attrs=rounding_of(linears[0]),
        domain=CASTIRON,
        hint=f"{linears[0].outputs[0].name}.qkv",
    )
    start = 0
    for linear, width in zip(linears, widths, strict=True):
        output = linear.outputs[0]
        rewriter.replace(output, rewriter.columns(joined, start, start + width, f"{output.name}.columns"))
        start += width
