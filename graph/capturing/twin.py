"""A small model of the same make: fewer and narrower layers, short windows, a small vocabulary.

The numeric check needs numbers through both the source model and the graph; for a large model it runs on a
twin, captured by the same code. The twin keeps every kind of layer and the width of a head.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import onnx
from onnx import helper

from ..checkpoint.config_values import EXPERT_COUNTS, EXPERT_PICKS

#: Up to here a model is its own twin.
MAX_PARAMETERS = 8_000_000
_MAX_LAYERS = 12
_VOCABULARY = 512
_WINDOW = 8
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_INNER_SIZE = 96
_INNER_SIZES = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
#: More than any model picks for a token.
_EXPERTS = 16


def is_small(config: Any, parameters: int) -> bool:
    """Whether the model itself can be run for the check, with its windows reached."""
    windows = [getattr(config, name, None) for name in _WINDOWS]
    reached = all(not isinstance(window, int) or window <= 2 * _WINDOW for window in windows)
    return parameters <= MAX_PARAMETERS and config.num_hidden_layers <= _MAX_LAYERS and reached


def twins(config: Any) -> Iterator[Any]:
    """Candidate configurations, the best first; some may be rejected by the model code."""
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    kv_heads = _kv_heads(config) or heads

    def lost(factor: int) -> int:
        return sum(count >= 2 > count // factor for count in (heads, kv_heads))

    factors = [f for f in range(heads, 0, -1) if heads % f == 0 and hidden % f == 0]
    # Narrow, but with several query and KV heads where the model has several: their order must show.
    factors.sort(key=lost)
    for factor in factors:
        twin = copy.deepcopy(config)
        _shorten(twin)
        _narrow(twin, factor)
        yield twin


def _kv_heads(config: Any) -> int | None:
    values = (getattr(config, name, None) for name in _KV_HEADS)
    return next((value for value in values if isinstance(value, int)), None)


def describe(config: Any) -> str:
    """The sizes of a twin, in words."""
    return (
        f"a twin with {config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"{config.num_attention_heads} heads"
    )


def _shorten(config: Any) -> None:
    count = int(config.num_hidden_layers)
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == count and count > 1
    }
    # As many layers as it takes to have one of each kind, by every per-layer list.
    keep = 2
    for values in lists.values():
        keep = max(keep, *(values.index(kind) + 1 for kind in values))
    dense = getattr(config, "first_k_dense_replace", None)  # layers before the first with experts
    keep = min(max(keep, dense + 1 if isinstance(dense, int) else 0), count)
    for name, values in lists.items():
        setattr(config, name, values[:keep])
    config.num_hidden_layers = keep
    for name in _WINDOWS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(_WINDOW, getattr(config, name)))
    if config.vocab_size > _VOCABULARY:
        config.vocab_size = _VOCABULARY
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(config, name, None) is not None:
                setattr(config, name, 0)


def _narrow(config: Any, factor: int) -> None:
    config.hidden_size //= factor
    config.num_attention_heads //= factor
    for name in _KV_HEADS:
        value = getattr(config, name, None)
        if isinstance(value, int):
            setattr(config, name, max(1, value // factor))
    for name in _INNER_SIZES:
        value = getattr(config, name, None)
        if isinstance(value, int):
            setattr(config, name, min(value, _INNER_SIZE))
    picks = max((n for name in EXPERT_PICKS if isinstance(n := getattr(config, name, None), int)), default=0)
    for name in EXPERT_COUNTS:
        value = getattr(config, name, None)
        if isinstance(value, int):
            setattr(config, name, min(value, max(_EXPERTS, picks)))
    if isinstance(getattr(config, "word_embed_proj_dim", None), int):
        config.word_embed_proj_dim //= factor


#: Attributes that say what is computed, not how large it is.
_KINDS = ("fn", "style", "cos_layout", "one_plus", "eps", "epsilon", "axis", "perm", "softcap", "scale")


def structural_difference(model: onnx.ModelProto, twin: onnx.ModelProto) -> str | None:
    """What the twin's layers do otherwise than the model's, or None if they do the same."""
    full, small = _layers(model), _layers(twin)
    for index, ops in small.items():
        if ops != full.get(index):
            return f"layer {index} has the ops {_brief(ops)}, the model's {_brief(full.get(index, []))}"
    return None


def _layers(model: onnx.ModelProto) -> dict[int, list[tuple[object, ...]]]:
    """Ops by layer: nodes whose module path has a number; -1 for those around the layers.

    A cast of a stored weight is left out: it tells how the weight is stored, and a twin's are float32.
    """
    layers: dict[int, list[tuple[object, ...]]] = {}
    stored = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Cast" and node.input[0] in stored:
            continue
        found = re.search(r"\.(\d+)/", node.name)
        kinds = tuple((a.name, helper.get_attribute_value(a)) for a in node.attribute if a.name in _KINDS)
        path = re.sub(r"_\d+$", "", node.name)
        layers.setdefault(int(found[1]) if found else -1, []).append((path, node.op_type, *kinds))
    return layers


def _brief(ops: list[tuple[object, ...]]) -> str:
    return ", ".join(str(op[1]) for op in ops[:40])
