"""The ops that capture puts into the traced model, as torch ops without an implementation.

They exist only under ``torch.export``, where their shape functions run; their meaning is given by
``castiron.graph.evaluate``, which computes them on the graph that is emitted.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor, empty_like
from torch.library import Library, register_fake

from ..custom import CustomOp

# torch leaves Library untyped.
_LIBRARY: Any = Library("castiron", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? slopes, int layer, float scale, "
    "int window, int chunk, float softcap) -> Tensor"
)
_LIBRARY.define("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")
_LIBRARY.define("rms_norm(Tensor x, Tensor? weight, float eps, bool one_plus) -> Tensor")
_LIBRARY.define("rope(Tensor x, Tensor cos, Tensor sin, str style, str cos_layout) -> Tensor")
_LIBRARY.define("activation(Tensor x, str fn) -> Tensor")
_LIBRARY.define(
    "expert_linear(Tensor x, Tensor expert_ids, Tensor weight, Tensor? bias, bool transposed) -> Tensor"
)
_LIBRARY.define("combine_experts(Tensor y, Tensor weights) -> Tensor")
_LIBRARY.define("custom(Tensor[] inputs, Tensor[] weights, str op, str attributes) -> Tensor")

#: The plugins' ops of the capture that runs (one at a time: see api.py): their shape rules.
CUSTOM_OPS: dict[str, CustomOp] = {}


@register_fake("castiron::attention")  # type: ignore[untyped-decorator]
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    layer: int,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


@register_fake("castiron::linear")  # type: ignore[untyped-decorator]
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@register_fake("castiron::rms_norm")  # type: ignore[untyped-decorator]
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, one_plus: bool) -> Tensor:
    return x.new_empty(x.shape)


@register_fake("castiron::rope")  # type: ignore[untyped-decorator]
def _rope(x: Tensor, cos: Tensor, sin: Tensor, style: str, cos_layout: str) -> Tensor:
    return x.new_empty(x.shape)


@register_fake("castiron::activation")  # type: ignore[untyped-decorator]
def _activation(x: Tensor, fn: str) -> Tensor:
    return empty_like(x)


@register_fake("castiron::expert_linear")  # type: ignore[untyped-decorator]
def _expert_linear(
    x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    return x.new_empty((*expert_ids.shape, weight.shape[2 if transposed else 1]))


@register_fake("castiron::combine_experts")  # type: ignore[untyped-decorator]
def _combine_experts(y: Tensor, weights: Tensor) -> Tensor:
    return y.new_empty((y.shape[0], y.shape[2]))


@register_fake("castiron::custom")  # type: ignore[untyped-decorator]
def _custom(inputs: list[Tensor], weights: list[Tensor], op: str, attributes: str) -> Tensor:
    rule = CUSTOM_OPS[op]
    operands: list[Any] = [tuple(x.shape[1:]) for x in inputs]
    operands += [None] * (len(rule.inputs) - len(inputs) - len(weights))
    operands += [tuple(w.shape) for w in weights]
    shape: Any
    (shape,) = rule.shape(*operands, **json.loads(attributes))
    return inputs[0].new_empty((1, *shape))
