"""What each kernel of docs/program.md takes: counts of operands and types of attributes, for the reader's
check.

Shapes are checked by the device, which knows them at the price of the arithmetic; this table keeps a damaged
or hand-made program from reaching it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NUMBER = (int, float)
#: A step of this name calls a kernel of a library that the engine carries (docs/plugins.md).
NATIVE = "native"
#: Kernels that adapters (LoRA) can add to.
PRODUCTS = ("linear", "gated_linear", "quantized_linear", "quantized_gated_linear")


@dataclass(frozen=True)
class Kernel:
    """Allowed counts of inputs, weights and outputs (ends included), and {attribute: type, or its allowed
    values}.
    """

    inputs: tuple[int, int]
    weights: tuple[int, int]
    outputs: tuple[int, int]
    attrs: Mapping[str, Any]


_ACTIVATION = ("none", "silu", "gelu_tanh", "gelu_erf", "gelu_quick", "relu", "relu2", "tanh", "sigmoid")
_UNARY = (
    *_ACTIVATION[1:],
    *("exp", "log", "sqrt", "rsqrt", "neg", "abs", "reciprocal", "softplus", "sin", "cos", "erf", "square"),
)
_ROTARY = {"head_dim": int, "rotary_dim": int, "interleaved": bool, "concat_halves": bool}
_CACHE = {"layer": int, "kv_heads": int, "head_dim": int, "v_head_dim": int}
_GATED = {"has_bias": bool, "activation": _ACTIVATION, "x_format": ("auto", "float")}
_LINEAR = {**_GATED, "has_residual": bool, "alpha": _NUMBER}
_ROUNDING = {
    "x_format": ("float", "int8", "fp8", "nvfp4", "mxfp4", "mxfp8"),
    "x_group": int,
    "x_scale": _NUMBER,
}
_QUANTIZED = {"group": int, "has_offsets": bool, "has_columns": bool, **_ROUNDING}
_EXPERTS = {"experts": int}
_NORM = {"eps": _NUMBER, "has_weight": bool}

KERNELS: Mapping[str, Kernel] = {
    "embedding": Kernel((1, 1), (1, 1), (1, 1), {"scale": _NUMBER, "index_offset": int}),
    "linear": Kernel((1, 2), (1, 2), (1, 1), _LINEAR),
    "gated_linear": Kernel((1, 1), (1, 2), (1, 1), _GATED),
    "quantized_linear": Kernel((1, 2), (2, 5), (1, 1), {**_LINEAR, **_QUANTIZED}),
    "quantized_gated_linear": Kernel((1, 1), (2, 5), (1, 1), {**_GATED, **_QUANTIZED}),
    "expert_linear": Kernel((2, 2), (1, 2), (1, 1), {**_GATED, **_EXPERTS}),
    "expert_gated_linear": Kernel((2, 2), (1, 2), (1, 1), {**_GATED, **_EXPERTS}),
    "quantized_expert_linear": Kernel((2, 2), (2, 5), (1, 1), {**_GATED, **_QUANTIZED, **_EXPERTS}),
    "quantized_expert_gated_linear": Kernel((2, 2), (2, 5), (1, 1), {**_GATED, **_QUANTIZED, **_EXPERTS}),
    "top_k": Kernel((1, 1), (0, 0), (2, 2), {}),
    "mark_places": Kernel((1, 1), (0, 0), (1, 1), {}),
    "gather_elements": Kernel((2, 2), (0, 0), (1, 1), {}),
    "round": Kernel((1, 1), (0, 0), (1, 1), _ROUNDING),
    "rms_norm": Kernel((1, 1), (0, 1), (1, 1), {**_NORM, "group": int}),
    "add_rms_norm": Kernel((2, 2), (0, 1), (2, 2), _NORM),
    "layer_norm": Kernel((1, 1), (0, 2), (1, 1), {**_NORM, "has_bias": bool, "group": int}),
    "add_layer_norm": Kernel((2, 2), (0, 2), (2, 2), {**_NORM, "has_bias": bool}),
    "rope": Kernel((2, 2), (2, 2), (1, 1), {**_ROTARY, "heads": int}),
    "rope_write_kv": Kernel((4, 4), (2, 2), (1, 1), {**_ROTARY, **_CACHE, "q_heads": int}),
    "write_kv": Kernel((2, 2), (0, 0), (0, 0), _CACHE),
    "paged_attention": Kernel(
        (1, 1),
        (0, 2),
        (1, 1),
        {
            **_CACHE,
            "q_heads": int,
            "scale": _NUMBER,
            "window": int,
            "chunk": int,
            "softcap": _NUMBER,
            "has_sinks": bool,
            "has_slopes": bool,
        },
    ),
    "gather_rows": Kernel((2, 2), (0, 0), (1, 1), {}),
    "unary": Kernel((1, 1), (0, 0), (1, 1), {"fn": _UNARY}),
    "binary": Kernel(
        (1, 2),
        (0, 1),
        (1, 1),
        {"fn": ("add", "sub", "mul", "div", "min", "max", "pow"), "b_weight": bool, "reverse": bool},
    ),
    "clip": Kernel((1, 1), (0, 0), (1, 1), {"min": _NUMBER, "max": _NUMBER}),
    "transpose": Kernel((1, 1), (0, 0), (1, 1), {"perm": list}),
    "copy": Kernel((1, 1), (0, 0), (1, 1), {}),
    "slice": Kernel((1, 1), (0, 0), (1, 1), {"axis": int, "start": int, "step": int}),
    "concat": Kernel((1, 256), (0, 0), (1, 1), {"axis": int}),
    "reduce": Kernel((1, 1), (0, 0), (1, 1), {"fn": ("sum", "mean", "max")}),
    "softmax": Kernel((1, 1), (0, 0), (1, 1), {}),
    "matmul": Kernel((2, 2), (0, 0), (1, 1), {}),
    "gather": Kernel((1, 2), (0, 1), (1, 1), {"axis": int, "x_weight": bool}),
}


def attr_fits(value: object, kind: Any) -> bool:
    """Tell whether an attribute's value is of its type; bool never passes as a number."""
    if kind is bool:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind in (int, list) or kind is _NUMBER:
        return isinstance(value, kind)
    return value in kind
