"""The choice of rows whose logits are wanted moves up: row-wise ops above it run on N rows instead of T."""

from __future__ import annotations

from .rewriter import CASTIRON, Node, PassContext, Rewriter, Tensor, optional_input, producer, shape_of

_ROWWISE = {"Linear", "GatedLinear", "RMSNorm", "LayerNorm", "Activation"}
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Tanh"}


def gather_last_tokens(rewriter: Rewriter, ctx: PassContext) -> int:
    """Move the gather by ``logit_rows`` above row-wise ops; returns how many ops it passed.

    It stops at the last attention, so the last layer's output projection and MLP, too, see only the rows
    that are sampled.
    """
    rows = next(t for t in rewriter.graph.inputs if t.name == "logit_rows")
    moved = 0
    for node in list(rewriter.graph.nodes):
        is_gather = node.op == "Gather" and not node.domain and int(node.attrs.get("axis", 0)) == 0
        if is_gather and node.inputs[1] is rows and shape_of(node.inputs[0])[:1] == ("T",):
            gathered = _gather(rewriter, node.inputs[0], rows)
            rewriter.replace(node.outputs[0], gathered)
            node.inputs.clear()
            node.outputs.clear()
    done: dict[str, Tensor] = {}
    while True:
        gathers = [n for n in rewriter.graph.nodes if n.op == "GatherRows" and n.outputs]
        lifted = sum(_lift(rewriter, gather, rows, done) for gather in gathers)
        if not lifted:
            rewriter.tidy()
            return moved
        moved += lifted


def _gather(rewriter: Rewriter, x: Tensor, rows: Tensor) -> Tensor:
    return rewriter.op(
        "GatherRows", [x, rows], ["N", *shape_of(x)[1:]], domain=CASTIRON, hint=f"{x.name}.logit_rows"
    )


def _lift(rewriter: Rewriter, gather: Node, rows: Tensor, done: dict[str, Tensor]) -> bool:
    x = gather.inputs[0]
    node = producer(x)
    if node is None or len(node.outputs) != 1 or any(t is not gather for t in rewriter.consumers(x)):
        return False
    operands = _row_operands(node)
    if operands is None:
        return False
    inputs: list[Tensor | None] = []
    for index in range(len(node.inputs)):
        tensor = optional_input(node, index)
        if tensor is not None and index in operands:
            if tensor.name not in done:
                done[tensor.name] = _gather(rewriter, tensor, rows)
            tensor = done[tensor.name]
        inputs.append(tensor)
    y = rewriter.op(
        node.op,
        inputs,
        shape_of(gather.outputs[0]),
        attrs=dict(node.attrs),
        domain=node.domain or "",
        hint=f"{x.name}.rows",
    )
    rewriter.replace(gather.outputs[0], y)
    done[x.name] = y
    # Detached at once: a dead reader would keep the ops above from seeing that only gathers are left.
    for dead in (gather, node):
        dead.inputs.clear()
        dead.outputs.clear()
    return True


def _row_operands(node: Node) -> set[int] | None:
    """Indices of the operands that have a row per token, or None when the op is not row-wise."""
    if node.domain == CASTIRON and node.op in _ROWWISE:
        return {0, 3} if node.op == "Linear" else {0}
    if not node.domain and node.op in _ELEMENTWISE:
        rank = len(shape_of(node.outputs[0]))
        return {i for i, t in enumerate(node.inputs) if len(shape_of(t)) == rank and shape_of(t)[0] == "T"}
    return None
