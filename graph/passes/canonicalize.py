"""One spelling per meaning: norms and activations that capture left as plain ONNX become castiron ops."""

from __future__ import annotations

import numpy as np

from .rewriter import (
    CASTIRON,
    Node,
    PassContext,
    Rewriter,
    Tensor,
    is_inline,
    optional_input,
    produced_by,
    shape_of,
)

_ACTIVATIONS = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid"}


def canonicalize(rewriter: Rewriter, ctx: PassContext) -> int:
    """Rewrite LayerNormalization, RMSNorm(one_plus), Relu, Tanh, Sigmoid, Gelu, x·sigmoid(x)."""
    applied = 0
    for node in list(rewriter.graph.nodes):
        if node.outputs and any(
            rule(rewriter, node) for rule in (_layer_norm, _one_plus, _activation, _silu)
        ):
            applied += 1
    rewriter.tidy()
    return applied


def _layer_norm(rewriter: Rewriter, node: Node) -> bool:
    if node.op != "LayerNormalization" or node.domain:
        return False
    x = node.inputs[0]
    if node.attrs.get("axis", -1) not in (-1, len(shape_of(x)) - 1) or len(node.outputs) != 1:
        return False
    weight, bias = optional_input(node, 1), optional_input(node, 2)
    # Capture writes ones and zeros where the source has no affine part: an exact no-op.
    weight = None if weight is not None and _filled_with(weight, 1.0) else weight
    bias = None if bias is not None and _filled_with(bias, 0.0) else bias
    attrs = {"eps": float(node.attrs.get("epsilon", 1e-5)), "group": 0}
    output = node.outputs[0]
    y = rewriter.op(
        "LayerNorm", [x, weight, bias], shape_of(output), attrs=attrs, domain=CASTIRON, hint=output.name
    )
    rewriter.replace(output, y)
    return True


def _filled_with(tensor: Tensor, value: float) -> bool:
    return is_inline(tensor) and bool(np.all(np.asarray(tensor.values) == value))


def _one_plus(rewriter: Rewriter, node: Node) -> bool:
    if node.op != "RMSNorm" or not node.attrs.get("one_plus"):
        return False
    weight = optional_input(node, 1)
    if weight is not None:
        one = rewriter.constant(np.ones(1, np.float32), "one")
        node.inputs[1] = rewriter.op(
            "Add", [rewriter.float32(weight), one], shape_of(weight), hint=f"{weight.name}.one_plus"
        )
    node.attrs["one_plus"] = 0
    return True


def _activation(rewriter: Rewriter, node: Node) -> bool:
    if node.domain:
        return False
    if node.op == "Gelu":
        fn = "gelu_tanh" if node.attrs.get("approximate") == "tanh" else "gelu_erf"
    elif node.op in _ACTIVATIONS:
        fn = _ACTIVATIONS[node.op]
    else:
        return False
    _replace_by_activation(rewriter, node, node.inputs[0], fn)
    return True


def _silu(rewriter: Rewriter, node: Node) -> bool:
    if node.op != "Mul" or node.domain:
        return False
    for x, gate in (node.inputs, node.inputs[::-1]):
        sigmoid = produced_by(gate, "Sigmoid", "Activation")
        if sigmoid is None or sigmoid.inputs[0] is not x:
            continue
        if sigmoid.op == "Sigmoid" or sigmoid.attrs["fn"] == "sigmoid":
            _replace_by_activation(rewriter, node, x, "silu")
            return True
    return False


def _replace_by_activation(rewriter: Rewriter, node: Node, x: Tensor, fn: str) -> None:
    output = node.outputs[0]
    y = rewriter.op("Activation", [x], shape_of(output), attrs={"fn": fn}, domain=CASTIRON, hint=output.name)
    rewriter.replace(output, y)
