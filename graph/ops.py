"""The op vocabulary of the graph: names, operands and attributes (docs/graph.md), as data.

Both stages share the domain: what capture emits (a leading batch dimension of one) and what the passes leave
(packed rows). Ops whose operands differ between the stages are listed with the union of their attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

#: Domain and version of the ops that ONNX lacks.
DOMAIN = "castiron"
DOMAIN_VERSION = 1
#: Version of the standard domain.
OPSET = 23

TOKEN_IDS = "token_ids"
POSITIONS = "positions"
LOGIT_ROWS = "logit_rows"
LOGITS = "logits"
#: Symbolic dimensions: tokens of the step, rows of which logits are wanted.
TOKENS = "T"
ROWS = "N"

#: Activation functions: attribute ``fn`` of ``Activation`` and ``activation`` of the fused ops.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf", "gelu_quick", "relu", "relu2", "tanh", "sigmoid")
ROPE_STYLES = ("half", "interleaved", "concat_halves")
COS_LAYOUTS = ("half", "repeat_block", "repeat_each")


@dataclass(frozen=True)
class OpSpec:
    """One op: operand names in order (``?`` marks an optional one) and its attributes' names."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...] = ()

    @property
    def required(self) -> int:
        """Number of leading operands that must be present."""
        return sum(not name.endswith("?") for name in self.inputs)


_HEADS = ("q_heads", "kv_heads", "head_dim", "v_head_dim")
_PAIRS = ("rotary_dim", "interleaved", "concat_halves")
_MASK = ("scale", "window", "chunk", "softcap")
#: How x is rounded before a product (docs/graph.md, "Quantized activations").
_ROUNDING = ("x_format", "x_group", "x_scale")
#: How a cache layer is rounded: "" | "fp8" | "int8", and a scale for each KV head.
_CACHE_ROUNDING = ("kv_format", "k_scale", "v_scale")

OPS: dict[str, OpSpec] = {
    "Linear": OpSpec(("x", "w", "b?", "residual?"), ("y",), ("activation", "alpha", *_ROUNDING)),
    "ExpertLinear": OpSpec(("x", "expert_ids", "w", "b?"), ("y",), ("experts", "source", *_ROUNDING)),
    "ExpertGatedLinear": OpSpec(
        ("x", "expert_ids", "w_gate", "w_up", "b_gate?", "b_up?"),
        ("y",),
        ("experts", "activation", *_ROUNDING),
    ),
    "MarkPlaces": OpSpec(("places",), ("marks",), ("width",)),
    "CombineExperts": OpSpec(("y", "weights"), ("o",)),
    "RMSNorm": OpSpec(("x", "w?"), ("y",), ("eps", "one_plus", "group")),
    "Rope": OpSpec(("x", "cos", "sin"), ("y",), ("style", "cos_layout")),
    "Attention": OpSpec(("q", "k", "v", "sinks?", "slopes?"), ("o",), ("layer", *_MASK)),
    "Activation": OpSpec(("x",), ("y",), ("fn",)),
    "GatedLinear": OpSpec(("x", "w_gate", "w_up", "b_gate?", "b_up?"), ("y",), ("activation", *_ROUNDING)),
    "AddRMSNorm": OpSpec(("x", "residual", "w?"), ("y", "sum"), ("eps", "one_plus")),
    "AddLayerNorm": OpSpec(("x", "residual", "w?", "b?"), ("y", "sum"), ("eps", "one_plus")),
    "LayerNorm": OpSpec(("x", "w?", "b?"), ("y",), ("eps", "group", "one_plus")),
    "RopeWriteKV": OpSpec(
        ("q", "k", "v", "positions", "cos", "sin"),
        ("q_rotated",),
        ("layer", *_HEADS, *_PAIRS, *_CACHE_ROUNDING),
    ),
    "WriteKV": OpSpec(
        ("k", "v"), ("kv_written",), ("layer", "kv_heads", "head_dim", "v_head_dim", *_CACHE_ROUNDING)
    ),
    "PagedRope": OpSpec(("x", "positions", "cos", "sin"), ("y",), ("heads", "head_dim", *_PAIRS)),
    "PagedAttention": OpSpec(("q", "sinks?", "slopes?", "kv_written?"), ("o",), ("layer", *_HEADS, *_MASK)),
    "Embedding": OpSpec(("ids", "table"), ("y",), ("scale", "index_offset")),
    "GatherRows": OpSpec(("x", "logit_rows"), ("y",)),
    # Weight expressions
    "Unpack": OpSpec(("raw",), ("codes",), ("layout",)),
    "PickRows": OpSpec(("w",), ("rows",), ("experts", "start", "step", "count")),
    "Quantize": OpSpec(("w", "scale", "offset?"), ("codes",), ("format", "group")),
    "Dequantize": OpSpec(("codes", "scale", "offset?"), ("w",), ("format", "group", "source")),
}


#: Which operands of a product are its matrices; its biases come right behind them, one for each.
MATRICES: dict[str, slice] = {
    "Linear": slice(1, 2),
    "GatedLinear": slice(1, 3),
    "ExpertLinear": slice(2, 3),
    "ExpertGatedLinear": slice(2, 4),
}


def check_vocabulary(model: onnx.ModelProto) -> None:
    """Raise ValueError when a node of the castiron domain is not as the vocabulary has it.

    A pass that emits an op with a missing operand or a misspelt attribute is found here, by name, instead of
    in the arithmetic of an engine.
    """
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        spec = OPS.get(node.op_type)
        if spec is None:
            raise ValueError(f"{node.name}: the castiron domain has no op {node.op_type!r}")
        operands = list(node.input)
        if (
            len(operands) > len(spec.inputs)
            or not all(operands[: spec.required])
            or len(operands) < spec.required
        ):
            raise ValueError(
                f"{node.name}: {node.op_type}({', '.join(spec.inputs)}): {len(operands)} operands, "
                f"{sum(map(bool, operands))} of them given"
            )
        unknown = {attribute.name for attribute in node.attribute} - set(spec.attributes)
        if unknown:
            raise ValueError(f"{node.name}: {node.op_type} has no attribute {', '.join(sorted(unknown))}")
