"""Rotation of the first columns of each head, with the rest passed through, becomes one partial Rope."""

from __future__ import annotations

from .rewriter import CASTIRON, Node, PassContext, Rewriter, Tensor, last_axis_range, produced_by, shape_of

_SWAP = [0, 2, 1, 3]


def fold_partial_rope(rewriter: Rewriter, ctx: PassContext) -> int:
    """Rewrite Concat(Rope(x[.., :r]), x[.., r:]) to Rope(x), whose cos and sin are narrower than x.

    Models that rotate before they swap heads and tokens have a Transpose on each side of the Rope; then so
    has the result.
    """
    applied = 0
    for node in list(rewriter.graph.nodes):
        if node.op != "Concat" or node.domain or len(node.inputs) != 2:
            continue
        if node.attrs.get("axis") not in (-1, len(shape_of(node.outputs[0])) - 1):
            continue
        rotated, swapped = _through_swap(node.inputs[0])
        rope = produced_by(rotated, "Rope")
        if rope is None:
            continue
        first = last_axis_range(_through_swap(rope.inputs[0])[0] if swapped else rope.inputs[0])
        rest = last_axis_range(node.inputs[1])
        if first is None or rest is None or first[0] is not rest[0]:
            continue
        if first[1] == 0 and first[2] == rest[1] and rest[2] == shape_of(first[0])[-1]:
            whole = _rotate(rewriter, rope, first[0], swapped, node.outputs[0].name)
            rewriter.replace(node.outputs[0], whole)
            applied += 1
    rewriter.tidy()
    return applied


def _through_swap(tensor: Tensor) -> tuple[Tensor, bool]:
    node = produced_by(tensor, "Transpose")
    if node is not None and list(node.attrs.get("perm", ())) == _SWAP:
        return node.inputs[0], True
    return tensor, False


def _rotate(rewriter: Rewriter, rope: Node, x: Tensor, swapped: bool, name: str) -> Tensor:
    if swapped:
        x = _swap(rewriter, x)
    cos, sin = rope.inputs[1:3]
    attrs = dict(rope.attrs)
    y = rewriter.op("Rope", [x, cos, sin], shape_of(x), attrs=attrs, domain=CASTIRON, hint=f"{name}.partial")
    return _swap(rewriter, y) if swapped else y


def _swap(rewriter: Rewriter, tensor: Tensor) -> Tensor:
    dims = shape_of(tensor)
    return rewriter.op("Transpose", [tensor], [dims[p] for p in _SWAP], attrs={"perm": _SWAP})
