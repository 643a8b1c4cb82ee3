"""What must hold before and after a capture: a model that fails one is refused, with module and reason."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from torch import nn

from castiron.errors import CheckpointError, UnsupportedModelError

from ..checkpoint.config_values import check_routing, check_values
from .experts import has_interface
from .layers import AttentionLayer

#: transformers versions whose dispatch points this adapter was written for: from, below.
SUPPORTED_TRANSFORMERS = ((5, 24), (5, 25))

_ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
#: Module class names of layers that the vocabulary has no op for, and what they are.
_UNSUPPORTED_MODULES = (
    (re.compile(r"Mamba|Ssm|SSM"), "a state-space layer"),
    (re.compile(r"DeltaNet|DeltaAttention|LinearAttention|Rwkv|RWKV|Retention"), "a linear-attention layer"),
    (re.compile(r"ShortConv|^Conv[123]d$"), "a convolution over tokens"),
    (re.compile(r"RGLRU|Rglru|Recurrent"), "a recurrent layer"),
)

#: Experts of a mixture.
_EXPERTS = re.compile(r"Experts?$")

#: Fields that change the logits and need no tensor, so that nothing else would miss them.
_FIELDS_THAT_MATTER = (
    "attention_chunk_size",
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "sliding_window",
)
#: Values of such a field that change nothing: absent, switched off, a factor of one.
_NEUTRAL = (None, False, 0, 1)


def check_version() -> None:
    """Raises UnsupportedModelError if the installed transformers is not one that the adapter knows."""
    installed = metadata.version("transformers")
    found = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    lowest, beyond = SUPPORTED_TRANSFORMERS
    if not lowest <= found < beyond:
        wanted = f">={lowest[0]}.{lowest[1]},<{beyond[0]}.{beyond[1]}"
        raise UnsupportedModelError(
            f"found transformers {installed}, expected {wanted}: capture hooks into its "
            f"internals, which move between releases. Run: pip install 'transformers{wanted}'"
        )


def check_fields(raw: Mapping[str, Any], config: Any) -> None:
    """Refuses a config.json (``raw``) with a field that other models compute with and this one lacks.

    transformers keeps such a field and ignores it: the model that was trained with it would be wrong.
    """
    known = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    for name in _FIELDS_THAT_MATTER:
        value = raw.get(name)
        if name in known or value in _NEUTRAL:
            continue
        if name == "sliding_window" and raw.get("use_sliding_window") is False:
            continue
        raise UnsupportedModelError(
            f"config.json sets {name} to {value!r}, which '{config.model_type}' models do not have: "
            f"transformers would ignore it. Correct model_type, or remove {name} if the model was trained "
            f"without it"
        )


def check_config(config: Any) -> None:
    """Refuses configurations whose kind of model is known to be out of reach."""
    text = config.get_text_config(decoder=True)
    if text is not config:
        raise UnsupportedModelError(
            f"'{config.model_type}' is a composite of a text model ('{text.model_type}') and others "
            f"(vision, audio ...); castiron builds text models. Save the language model alone "
            f"(AutoModelForCausalLM with the text config, save_pretrained) and build that"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"'{config.model_type}' is an encoder-decoder; castiron builds decoders")
    if getattr(config, "quantization_config", None) is not None:
        method = config.quantization_config
        method = method.get("quant_method") if isinstance(method, dict) else method.quant_method
        raise UnsupportedModelError(
            f"config.json has a quantization_config ('{method}'); this version builds from "
            f"unquantized checkpoints"
        )
    check_values(config.to_dict(), f"the configuration of '{config.model_type}'")
    check_routing(config.to_dict(), f"the configuration of '{config.model_type}'")
    kinds = getattr(config, "layer_types", None)
    # Saved configurations of models that use no window may say 0, and name no layer that has one.
    if getattr(config, "sliding_window", None) == 0 and (not kinds or "sliding_attention" in kinds):
        raise CheckpointError(
            f"config.json sets sliding_window to 0, and '{config.model_type}' has a window in its attention: "
            f"no token would see another. Correct it; null is no window"
        )
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _ATTENTION_TYPES:
            raise UnsupportedModelError(
                f"layer {index} of '{config.model_type}' is of type '{kind}' (config.json: layer_types); "
                f"castiron's graph has ops for {', '.join(_ATTENTION_TYPES)}"
            )


def check_layer_count(config: Any, tensors: int) -> None:
    """Refuses a configuration with more layers than the checkpoint has tensors: every layer has some.

    Building such a model, even without memory for its weights, would take hours before the first tensor that
    is not there could be named.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > tensors:
        raise CheckpointError(
            f"config.json sets num_hidden_layers to {layers}, but the checkpoint holds {tensors} tensors, "
            f"fewer than one a layer. The checkpoint is incomplete, or config.json belongs to another model"
        )


def check_modules(model: nn.Module) -> None:
    """Refuses models that hold a layer the vocabulary has no op for. Names the first such module."""
    for name, module in model.named_modules():
        if _EXPERTS.search(type(module).__name__) and not has_interface(module):
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported: {name} ({type(module).__name__}) is a mixture of "
                f"experts that does not go through transformers' experts interface"
            )
        for pattern, what in _UNSUPPORTED_MODULES:
            if pattern.search(type(module).__name__):
                raise UnsupportedModelError(
                    f"{type(model).__name__} is not supported: {name or 'the model'} "
                    f"({type(module).__name__}) is {what}, which castiron's graph has no op for yet"
                )


def census(config: Any, layers: tuple[AttentionLayer, ...]) -> None:
    """Compares the attention ops found with the layers that the configuration announces.

    A model file that writes attention out in plain ops may give right logits in a graph that cannot be
    cached."""
    count = int(config.num_hidden_layers)
    found = [layer.index for layer in layers]
    if found != list(range(count)):
        raise UnsupportedModelError(
            f"'{config.model_type}' announces {count} layers, but the traced model has attention ops for "
            f"{found or 'none'}; its model code does not use transformers' attention interface in every layer"
        )
    kinds = getattr(config, "layer_types", None) or [None] * count
    for layer, kind in zip(layers, kinds, strict=True):
        expected = {
            None: (layer.window, layer.chunk),
            "full_attention": (0, 0),
            "sliding_attention": (getattr(config, "sliding_window", None) or 0, 0),
            "chunked_attention": (0, getattr(config, "attention_chunk_size", None) or 0),
        }[kind]
        if (layer.window, layer.chunk) != expected:
            raise UnsupportedModelError(
                f"layer {layer.index} of '{config.model_type}' is '{kind}' in the configuration (window, "
                f"chunk {expected}), but its attention was called with {(layer.window, layer.chunk)}"
            )
