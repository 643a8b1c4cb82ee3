"""Translations of products, norms, embeddings and the ops that capture put in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto
from torch import fx

from .arguments import arguments, is_tensor, rank, refuse
from .emitter import Emitter


def _linear(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    bias = None if a["bias"] is None else e.name(a["bias"])
    e.emit_own(node, "Linear", e.name(a["input"]), e.name(a["weight"]), bias)


def _addmm(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    if a["alpha"] != 1 or a["beta"] != 1 or not _is_weight(a["mat2"]) or rank(a["self"]) != 1:
        raise refuse(e, node, "only x·w + bias with a constant w is translated")
    e.emit_own(node, "Linear", e.name(a["mat1"]), _transposed(e, a["mat2"]), e.name(a["self"]))


def _matmul(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    left, right = a["self"], a["other"] if "other" in a else a["mat2"]
    if rank(right) == 2 and _is_weight(right):
        e.emit_own(node, "Linear", e.name(left), _transposed(e, right))
    else:
        e.emit(node, "MatMul", e.name(left), e.name(right))


def _is_weight(node: fx.Node) -> bool:
    """Whether the value comes from parameters and buffers alone."""
    if node.op == "placeholder":
        return node.name not in ("token_ids", "positions", "logit_rows")
    return node.op == "call_function" and all(_is_weight(source) for source in node.all_input_nodes)


def _transposed(e: Emitter, weight: fx.Node) -> str:
    return e.permuted(weight, e.name(weight), [1, 0], tuple(reversed(e.shape(weight))))


def _embedding(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    e.emit(node, "Gather", e.name(a["weight"]), e.name(a["indices"]), axis=0)


def _layer_norm(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    sizes = [int(size) for size in a["normalized_shape"]]
    # The scale is a required operand in ONNX.
    scale = e.builder.constant(np.ones(sizes, np.float32), f"ones_{'x'.join(map(str, sizes))}")
    weight = scale if a["weight"] is None else e.name(a["weight"])
    bias = None if a["bias"] is None else e.name(a["bias"])
    e.emit(
        node,
        "LayerNormalization",
        e.name(a["input"]),
        weight,
        bias,
        axis=-len(sizes),
        epsilon=float(a["eps"]),
    )


def _aten_rms_norm(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    if len(a["normalized_shape"]) != 1 or a["eps"] is None:
        raise refuse(e, node, "only a norm over the last axis with a given eps is translated")
    weight = None if a["weight"] is None else e.name(a["weight"])
    e.emit_own(node, "RMSNorm", e.name(a["input"]), weight, eps=float(a["eps"]), one_plus=0)


def _rms_norm(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    weight = None if a["weight"] is None else e.name(a["weight"])
    e.emit_own(node, "RMSNorm", e.name(a["x"]), weight, eps=a["eps"], one_plus=int(a["one_plus"]))


def _rope(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    e.emit_own(
        node,
        "Rope",
        *(e.name(a[operand]) for operand in ("x", "cos", "sin")),
        style=a["style"],
        cos_layout=a["cos_layout"],
    )


def _attention(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    operands = [
        e.name(a[name]) if is_tensor(a[name]) else None for name in ("q", "k", "v", "sinks", "slopes")
    ]
    names = ("layer", "scale", "window", "chunk", "softcap")
    e.emit_own(node, "Attention", *operands, **{name: a[name] for name in names})


def _activation(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    e.emit_own(node, "Activation", e.name(a["x"]), fn=a["fn"])


def _expert_linear(e: Emitter, node: fx.Node) -> None:
    """The matrices of all experts, one below the other."""
    a = arguments(node)
    experts, outputs, inputs = (int(size) for size in e.shape(a["weight"]))
    weight = source = e.name(a["weight"])
    if a["transposed"]:
        outputs, inputs = inputs, outputs
        weight = e.permuted(a["weight"], weight, [0, 2, 1], (experts, outputs, inputs))
    rows = (experts * outputs, inputs)
    stacked = e.temporary(node, "Reshape", [weight, e.ints(list(rows))], rows, TensorProto.FLOAT)
    bias = None
    if a["bias"] is not None:
        size = e.ints([rows[0]])
        bias = e.temporary(node, "Reshape", [e.name(a["bias"]), size], rows[:1], TensorProto.FLOAT)
    operands = (e.name(a["x"]), e.name(a["expert_ids"]), stacked, bias)
    e.emit_own(node, "ExpertLinear", *operands, experts=experts, source=source)


def _combine_experts(e: Emitter, node: fx.Node) -> None:
    a = arguments(node)
    e.emit_own(node, "CombineExperts", e.name(a["y"]), e.name(a["weights"]))


LINEAR: dict[str, Callable[[Emitter, fx.Node], None]] = {
    "aten.linear": _linear,
    "castiron.linear": _linear,
    "aten.addmm": _addmm,
    "aten.matmul": _matmul,
    "aten.mm": _matmul,
    "aten.bmm": _matmul,
    "aten.embedding": _embedding,
    "aten.layer_norm": _layer_norm,
    "aten.rms_norm": _aten_rms_norm,
    "castiron.rms_norm": _rms_norm,
    "castiron.rope": _rope,
    "castiron.attention": _attention,
    "castiron.activation": _activation,
    "castiron.expert_linear": _expert_linear,
    "castiron.combine_experts": _combine_experts,
}
