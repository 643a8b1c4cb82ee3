"""From the parameter names of the instantiated transformers model to the names stored in the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from castiron.errors import CheckpointError


@dataclass(frozen=True)
class ModelNames:
    """What transformers knows about names of one architecture.

    ``tied`` maps a parameter to the one it is tied to when the config says so; ``ignored`` are regular
    expressions of stored tensors that the model's code declares unused.
    """

    class_name: str
    base_prefix: str
    tied: Mapping[str, str]
    ignored: tuple[str, ...]
    renamings: tuple[Any, ...]
    converters: tuple[Any, ...]


def model_names(model_class: type[Any], model_type: str) -> ModelNames:
    """Read the naming rules off a transformers model class, without an instance."""
    # Imported here: torch and transformers are needed only when names are resolved.
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    transforms: list[Any] = []
    # Precedence as in transformers: a mapping for the class, else one for the model type; then "legacy".
    mapping: Callable[[str], list[Any] | None] = get_checkpoint_conversion_mapping
    own = mapping(model_class.__name__)
    transforms += own if own is not None else (mapping(model_type) or [])
    transforms += mapping("legacy") or []
    tied = model_class._tied_weights_keys
    return ModelNames(
        class_name=model_class.__name__,
        base_prefix=model_class.base_model_prefix or "",
        tied=dict(tied) if isinstance(tied, Mapping) else {},
        ignored=tuple(model_class._keys_to_ignore_on_load_unexpected or ()),
        renamings=tuple(t for t in transforms if not isinstance(t, WeightConverter)),
        converters=tuple(t for t in transforms if isinstance(t, WeightConverter)),
    )


def renamed(stored: Iterable[str], names: ModelNames) -> dict[str, str]:
    """Parameter name -> stored name, after transformers' own renamings.

    Raises ``CheckpointError`` when two stored tensors claim the same parameter, or when the tensors would
    have to be combined (per-expert weights into one), which this version does not do.
    """
    result: dict[str, str] = {}
    for stored_name in stored:
        name = stored_name
        for transform in names.renamings:
            name, _ = transform.rename_source_key(name)
        for converter in names.converters:
            _, pattern = converter.rename_source_key(name)
            if pattern is not None:
                raise CheckpointError(
                    f"tensor {stored_name!r} is one of several that {names.class_name} combines into one "
                    f"parameter (pattern {pattern!r}); this version needs parameters stored whole."
                )
        if name in result:
            raise CheckpointError(
                f"tensors {result[name]!r} and {stored_name!r} both stand for the parameter {name!r}; "
                "keep one of them."
            )
        result[name] = stored_name
    return result


def spellings(parameter: str, base_prefix: str) -> tuple[str, ...]:
    """The names under which a parameter may be stored: as it is, or as saved from the base model alone."""
    prefix = f"{base_prefix}."
    if base_prefix and parameter.startswith(prefix):
        return (parameter, parameter.removeprefix(prefix))
    return (parameter,)


def ignorable_reason(
    stored: str, shape: tuple[int, ...], config: Mapping[str, Any], names: ModelNames
) -> str | None:
    """Why a stored tensor that the model does not use may be left out; None if there is no known reason."""
    if re.search(r"rotary_emb\.inv_freq$", stored):
        return "rotary frequencies, computed from the config"
    if re.search(r"(attn|attention)\.(masked_bias|bias)$", stored) and (
        len(shape) == 4 or shape in ((), (1,))
    ):
        return "causal mask stored by an old version of transformers"
    if re.search(r"(^|\.)position_ids$", stored):
        return "position counter, computed"
    if re.search(r"(^|\.)mtp(\.|_)", stored):
        return "extra prediction layer, not used for generation"
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", stored)
    layers = config.get("num_hidden_layers")
    extra = config.get("num_nextn_predict_layers")
    if (
        layer
        and isinstance(layers, int)
        and isinstance(extra, int)
        and layers <= int(layer[1]) < layers + extra
    ):
        return f"extra prediction layer (num_nextn_predict_layers {extra}), not used for generation"
    # A mask pattern such as "attn.bias" must not excuse a real bias vector: masks were told by shape.
    patterns = [pattern for pattern in names.ignored if not pattern.endswith("bias")]
    if any(re.search(pattern, stored) for pattern in patterns):
        return f"{names.class_name} declares it unused"
    return None
