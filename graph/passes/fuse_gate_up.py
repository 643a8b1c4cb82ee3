"""act(x·gate) · (x·up) becomes GatedLinear: one pass over x, no intermediate tensors."""

from __future__ import annotations

from .rewriter import (
    CASTIRON,
    Node,
    PassContext,
    Rewriter,
    Tensor,
    codes_of,
    last_axis_range,
    optional_input,
    produced_by,
    rounding_of,
    shape_of,
)


def fuse_gate_up(rewriter: Rewriter, ctx: PassContext) -> int:
    """Rewrite both forms, two Linears or one whose output is cut in two; returns how many."""
    applied = 0
    for node in list(rewriter.graph.nodes):
        if node.op != "Mul" or node.domain or not node.outputs:
            continue
        for gate, up in (node.inputs, node.inputs[::-1]):
            activation = produced_by(gate, "Activation")
            if activation is None or not rewriter.read_only_by(gate, node):
                continue
            if _fuse(rewriter, node, activation, up):
                applied += 1
                break
    rewriter.tidy()
    return applied


def _fuse(rewriter: Rewriter, node: Node, activation: Node, up: Tensor) -> bool:
    gate_half = _projection(rewriter, activation.inputs[0])
    up_half = _projection(rewriter, up)
    if (
        gate_half is None
        or up_half is None
        or gate_half.x is not up_half.x
        or rounding_of(gate_half.linear) != rounding_of(up_half.linear)
        or codes_of(gate_half.linear.inputs[1]) != codes_of(up_half.linear.inputs[1])
        or gate_half.width != up_half.width
    ):
        return False
    output = node.outputs[0]
    if shape_of(output)[-1] != gate_half.width:
        return False
    y = rewriter.op(
        "GatedLinear",
        [gate_half.x, gate_half.weight(), up_half.weight(), gate_half.bias(), up_half.bias()],
        shape_of(output),
        attrs={"activation": activation.attrs["fn"], **rounding_of(gate_half.linear)},
        domain=CASTIRON,
        hint=f"{output.name}.gated",
    )
    rewriter.replace(output, y)
    return True


class _Half:
    """Output features [start, stop) of a Linear, as a projection of their own."""

    def __init__(self, rewriter: Rewriter, linear: Node, start: int, stop: int) -> None:
        self.rewriter = rewriter
        self.linear = linear
        self.start = start
        self.stop = stop
        self.x = linear.inputs[0]
        self.width = stop - start

    def weight(self) -> Tensor:
        return self._rows(self.linear.inputs[1])

    def bias(self) -> Tensor | None:
        bias = optional_input(self.linear, 2)
        return None if bias is None else self._rows(bias)

    def _rows(self, tensor: Tensor) -> Tensor:
        dims = shape_of(tensor)
        if self.width == dims[0]:
            return tensor
        bounds = [self.rewriter.constant([v], "bound") for v in (self.start, self.stop, 0, 1)]
        name = f"{tensor.name}[{self.start}:{self.stop}]"
        return self.rewriter.op(
            "Slice", [tensor, *bounds], [self.width, *dims[1:]], dtype=tensor.dtype, hint=name
        )


def _projection(rewriter: Rewriter, tensor: Tensor) -> _Half | None:
    if len(shape_of(tensor)) != 2:
        return None
    linear = produced_by(tensor, "Linear")
    start, stop = 0, int(shape_of(tensor)[-1])
    if linear is None:
        part = last_axis_range(tensor)
        if part is None or len(tensor.outputs) != 1:
            return None
        source, start, stop = part
        linear = produced_by(source, "Linear")
    elif len(tensor.outputs) != 1:
        return None
    plain = (
        linear is not None
        and optional_input(linear, 3) is None
        and linear.attrs.get("activation", "none") == "none"
        and linear.attrs.get("alpha", 1.0) == 1.0
    )
    return _Half(rewriter, linear, start, stop) if plain else None
