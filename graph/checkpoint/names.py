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


@dataclass(frozen=True)
class StoredNames:
    """Where the parameters of a model are stored.

    Attributes:
        whole: parameter -> stored name.
        stacked: parameter -> for each expert, the stored matrices that lie one below the other in it.
    """

    whole: Mapping[str, str]
    stacked: Mapping[str, tuple[tuple[str, ...], ...]]


def stored_names(stored: Iterable[str], names: ModelNames) -> StoredNames:
    """Parameters by stored names, after transformers' own renamings and its stacking of experts.

    Raises ``CheckpointError`` when two stored tensors claim the same place, when an expert is missing, or
    when tensors would have to be combined otherwise.
    """
    whole: dict[str, str] = {}
    stacks: dict[str, _Stack] = {}
    for stored_name in stored:
        name = stored_name
        for transform in names.renamings:
            name, _ = transform.rename_source_key(name)
        for converter in names.converters:
            parameter, pattern = converter.rename_source_key(name)
            if pattern is None:
                continue
            stack = stacks.setdefault(parameter, _Stack(parameter, converter, names.class_name))
            stack.put(stored_name, name, pattern)
            break
        else:
            if name in whole:
                raise CheckpointError(
                    f"tensors {whole[name]!r} and {stored_name!r} both stand for the parameter {name!r}; "
                    "keep one of them."
                )
            whole[name] = stored_name
    return StoredNames(whole, {name: stack.rows() for name, stack in stacks.items()})


class _Stack:
    """A parameter of all experts under construction: matrix ``pattern`` of expert ``index``."""

    def __init__(self, parameter: str, converter: Any, class_name: str) -> None:
        self._parameter, self._class_name = parameter, class_name
        self._patterns = list(converter.source_patterns)
        self._known = [_described(step) for step in converter.operations] in _STACKINGS
        self._places: dict[tuple[int, str], str] = {}

    def put(self, stored: str, name: str, pattern: str) -> None:
        """Tensor ``stored``, called ``name`` after renamings, was told by ``pattern``."""
        index = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
        if not self._known or index is None or pattern not in self._patterns:
            raise CheckpointError(
                f"tensor {stored!r} is one of several that {self._class_name} combines into the parameter "
                f"{self._parameter!r} (pattern {pattern!r}) in a way that this version does not know."
            )
        place = int(index[1]), pattern
        if place in self._places:
            raise CheckpointError(
                f"tensors {self._places[place]!r} and {stored!r} are both matrix {pattern!r} of expert "
                f"{place[0]} of {self._parameter!r}; keep one of them."
            )
        self._places[place] = stored

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """See ``StoredNames.stacked``."""
        experts = 1 + max(index for index, _ in self._places)
        for index in range(experts):
            for pattern in self._patterns:
                if (index, pattern) not in self._places:
                    raise CheckpointError(
                        f"expert {index} of {experts} lacks its matrix {pattern!r} of {self._parameter!r}; "
                        "the checkpoint is incomplete."
                    )
        return tuple(
            tuple(self._places[index, pattern] for pattern in self._patterns) for index in range(experts)
        )


#: What transformers does with the matrices of experts: [N, K] each, stacked to [E, N, K]; of several kinds
#: (gate and up) one below the other.
_STACKINGS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def _described(step: Any) -> tuple[str, object]:
    return type(step).__name__, getattr(step, "dim", None)


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
