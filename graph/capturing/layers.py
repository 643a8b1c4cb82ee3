"""The attention layers of a captured graph, as data."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import helper


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of the captured graph. ``window`` and ``chunk`` in tokens, 0: unlimited."""

    index: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int
    chunk: int


def attention_layers(model: onnx.ModelProto) -> tuple[AttentionLayer, ...]:
    """The attention ops of a captured graph, in the order of the cache layers they use."""
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.value_info
    }
    layers = []
    for node in model.graph.node:
        if node.op_type != "Attention":
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        q, k, v = (shapes[name] for name in node.input[:3])
        sizes = (q[1], k[1], k[3], v[3])
        layers.append(AttentionLayer(attributes["layer"], *sizes, attributes["window"], attributes["chunk"]))
    return tuple(sorted(layers, key=lambda layer: layer.index))
