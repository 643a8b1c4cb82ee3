"""Parameters that are made of stored tensors in the captured graph; what codes say of x and the cache."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import onnx

from castiron.errors import CheckpointError

from ..quant_plan import CacheScales, LinearPlan, QuantPlan
from .layers import AttentionLayer

if TYPE_CHECKING:
    from ..checkpoint.quantized import CacheNumbers, MadeTensor


def put_made(
    model: onnx.ModelProto,
    tensors: Mapping[str, MadeTensor],
    cache: CacheNumbers,
    layers: Sequence[AttentionLayer],
) -> QuantPlan:
    """Replace the tensors that stand for made parameters by nodes over what is stored, in ``model``.

    Returns the rest of what the checkpoint says, for the passes. Raises ``CheckpointError`` for scales of
    a cache layer that the model does not have.
    """
    from ..checkpoint.quantized.expand import expand

    placed = expand(model, tensors)
    linears = {
        name: LinearPlan(x_format=rounding.x_format, x_group=rounding.x_group, x_scale=rounding.x_scale)
        for name in placed
        if (rounding := tensors[name].rounding).x_format
    }
    scales = {
        layer.index: CacheScales((k,) * layer.kv_heads, (v,) * layer.kv_heads)
        for layer, k, v in _by_layer(cache.k, cache.v, layers)
    }
    return QuantPlan(linears, cache.format, scales)


def _by_layer(
    keys: Mapping[str, float], values: Mapping[str, float], layers: Sequence[AttentionLayer]
) -> list[tuple[AttentionLayer, float, float]]:
    """Layers with the scales of their keys and values; 1 where only the other is stored."""
    by_index = {layer.index: layer for layer in layers}
    found = []
    for name in sorted(keys.keys() | values.keys()):
        number = re.search(r"\.(\d+)\.", f"{name}.")
        layer = by_index.get(int(number[1])) if number else None
        if layer is None:
            raise CheckpointError(
                f"cache scales are stored for {name!r}, which is none of the model's {len(layers)} layers"
            )
        found.append((layer, keys.get(name, 1.0), values.get(name, 1.0)))
    return found
