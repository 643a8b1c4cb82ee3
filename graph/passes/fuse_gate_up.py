"""act(x·gate) · (x·up) becomes GatedLinear, of experts ExpertGatedLinear: one pass over x."""

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

_GATED = {"Linear": "GatedLinear", "ExpertLinear": "ExpertGatedLinear"}


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
        or gate_half.kind != up_half.kind
        or any(a is not b for a, b in zip(gate_half.x, up_half.x, strict=True))
        or rounding_of(gate_half.linear) != rounding_of(up_half.linear)
        or codes_of(gate_half.stored) != codes_of(up_half.stored)
        or gate_half.width != up_half.width
    ):
        return False
    output = node.outputs[0]
    if shape_of(output)[-1] != gate_half.width:
        return False
    attrs = {"activation": activation.attrs["fn"], **rounding_of(gate_half.linear)}
    if gate_half.experts:
        attrs["experts"] = gate_half.experts
    y = rewriter.op(
        _GATED[gate_half.kind],
        [*gate_half.x, gate_half.weight(), up_half.weight(), gate_half.bias(), up_half.bias()],
        shape_of(output),
        attrs=attrs,
        domain=CASTIRON,
        hint=f"{output.name}.gated",
    )
    rewriter.replace(output, y)
    return True


class _Half:
    """Output features [start, stop) of a Linear or an ExpertLinear, as a projection of their own."""

    def __init__(self, rewriter: Rewriter, linear: Node, start: int, stop: int) -> None:
        self.rewriter = rewriter
        self.linear = linear
        self.start = start
        self.stop = stop
        self.kind: str = linear.op
        self.experts = int(linear.attrs.get("experts", 0))
        inputs = 2 if self.experts else 1  # those of experts name the matrix as well
        self.x = linear.inputs[:inputs]
        self.stored = linear.inputs[inputs]
        self._bias = optional_input(linear, inputs + 1)
        self.width = stop - start

    def weight(self) -> Tensor:
        return self._rows(self.stored)

    def bias(self) -> Tensor | None:
        return None if self._bias is None else self._rows(self._bias)

    def _rows(self, tensor: Tensor) -> Tensor:
        if self.experts:
            return self.rewriter.pick_rows(tensor, self.experts, self.start, self.width)
        dims = shape_of(tensor)
        if self.width == dims[0]:
            return tensor
        bounds = [self.rewriter.constant([v], "bound") for v in (self.start, self.stop, 0, 1)]
        name = f"{tensor.name}[{self.start}:{self.stop}]"
        return self.rewriter.op(
            "Slice", [tensor, *bounds], [self.width, *dims[1:]], dtype=tensor.dtype, hint=name
        )


def _projection(rewriter: Rewriter, tensor: Tensor) -> _Half | None:
    kind = {2: "Linear", 3: "ExpertLinear"}.get(len(shape_of(tensor)))
    if kind is None:
        return None
    linear = produced_by(tensor, kind)
    start, stop = 0, int(shape_of(tensor)[-1])
    if linear is None:
        part = last_axis_range(tensor)
        if part is None or len(tensor.outputs) != 1:
            return None
        source, start, stop = part
        linear = produced_by(source, kind)
    elif len(tensor.outputs) != 1:
        return None
    plain = (
        linear is not None
        and (kind != "Linear" or optional_input(linear, 3) is None)
        and linear.attrs.get("activation", "none") == "none"
        and linear.attrs.get("alpha", 1.0) == 1.0
    )
    return _Half(rewriter, linear, start, stop) if plain else None
