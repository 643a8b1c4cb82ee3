"""Attention and masks: transformers' dispatch points filled with the graph's own attention op.

The attention function gets q, k and v before any repetition of KV heads. Masks never become tensors: the mask
factories are replaced by ones that return what the mask *is* (causal, windowed, chunked).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from castiron.errors import UnsupportedModelError

from . import torch_ops
from .patches import Patches
from .source_hash import check_body

assert torch_ops  # imported for its registration of torch.ops.castiron

#: The name under which the attention function is registered with transformers while capturing.
IMPLEMENTATION = "castiron"


@dataclass(frozen=True)
class MaskSpec:
    """What a mask lets through: all before, ``window`` tokens back, or the own ``chunk``. 0: no limit."""

    window: int = 0
    chunk: int = 0

    # Some models look at a mask before they pass it on; these make it look like one.
    ndim = 4

    def to(self, *_: object, **__: object) -> MaskSpec:
        """Returns itself: a description has neither device nor dtype."""
        return self


#: Keyword arguments that reach the attention function and change nothing without a cache, a batch or a loss.
_HARMLESS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "num_items_in_batch",
    }
)
#: What the mask factories may be given beyond the configuration.
_MASK_HARMLESS = frozenset(
    {"inputs_embeds", "position_ids", "cache_position", "layer_idx", "allow_is_causal_skip"}
)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function in transformers' registry: one ``castiron::attention`` op.

    query [B, Hq, T, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv] -> [B, T, Hq, Dv]. Raises
    UnsupportedModelError for every argument whose meaning the op does not carry.
    """
    where = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise UnsupportedModelError(
            f"{where} passes {', '.join(unknown)} to its attention function; castiron's attention op has no "
            f"such operand, so the model would be computed wrongly"
        )
    if is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{where} is bidirectional; castiron serves causal language models")
    if dropout:
        raise UnsupportedModelError(f"{where} applies dropout {dropout} in evaluation mode")
    if not isinstance(attention_mask, MaskSpec):
        raise UnsupportedModelError(
            f"{where} builds its own attention mask ({type(attention_mask).__name__}); castiron understands "
            f"masks made by transformers' create_*_mask functions"
        )
    if (sliding_window or 0) != attention_mask.window:
        # Two sources that must say the same: a guess between them would be a silently wrong model.
        raise UnsupportedModelError(
            f"{where} has a mask with window {attention_mask.window}, but passes "
            f"sliding_window={sliding_window}"
        )
    output = torch.ops.castiron.attention(
        query,
        key,
        value,
        s_aux,
        None,
        int(cast(int, module.layer_idx)),
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        attention_mask.window,
        attention_mask.chunk,
        float(softcap or 0.0),
    )
    return output, None


#: Order of the factories' arguments behind ``config``, for callers that do not name them.
_MASK_POSITIONAL = ("inputs_embeds", "attention_mask", "cache", "position_ids")


def _check_mask_arguments(
    kind: str, config: Any, positional: tuple[object, ...], named: dict[str, object]
) -> None:
    arguments = {**dict(zip(_MASK_POSITIONAL, positional, strict=False)), **named}
    if len(positional) > len(_MASK_POSITIONAL):
        arguments["further arguments"] = positional[len(_MASK_POSITIONAL) :]
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(
            f"the configuration of '{config.model_type}' asks for bidirectional attention; castiron serves "
            f"causal language models"
        )
    unknown = sorted(
        name for name, given in arguments.items() if given is not None and name not in _MASK_HARMLESS
    )
    if unknown:
        raise UnsupportedModelError(
            f"the model code of '{config.model_type}' passes {', '.join(unknown)} to create_{kind}_mask; "
            f"castiron understands plain causal, sliding-window and chunked masks"
        )


def _causal(config: Any, *positional: object, **arguments: object) -> MaskSpec:
    _check_mask_arguments("causal", config, positional, arguments)
    return MaskSpec()


def _sliding_window(config: Any, *positional: object, **arguments: object) -> MaskSpec:
    _check_mask_arguments("sliding_window_causal", config, positional, arguments)
    return MaskSpec(window=int(config.sliding_window))


def _chunked(config: Any, *positional: object, **arguments: object) -> MaskSpec:
    _check_mask_arguments("chunked_causal", config, positional, arguments)
    return MaskSpec(chunk=int(config.attention_chunk_size))


def _bidirectional(config: Any, *_: object, **__: object) -> MaskSpec:
    raise UnsupportedModelError(
        f"'{config.model_type}' builds a bidirectional mask; castiron serves causal models"
    )


#: transformers' mask factories by name, with what takes their place.
MASK_FACTORIES: dict[str, Callable[..., MaskSpec]] = {
    "create_causal_mask": _causal,
    "create_sliding_window_causal_mask": _sliding_window,
    "create_chunked_causal_mask": _chunked,
    "create_bidirectional_mask": _bidirectional,
    "create_bidirectional_sliding_window_mask": _bidirectional,
}


@contextmanager
def dispatch() -> Iterator[None]:
    """While it lasts, transformers knows the attention implementation ``castiron``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with Patches() as patches:
        patches.entry(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, IMPLEMENTATION, attention_forward)
        _register_classes(patches)
        yield


def _register_classes(patches: Patches) -> None:
    """Makes model files with their own table of attention classes build their plain one for us."""
    from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES
    from transformers.models.gpt_neo.modeling_gpt_neo import GPT_NEO_ATTENTION_CLASSES

    for classes in (FALCON_ATTENTION_CLASSES, GPT_NEO_ATTENTION_CLASSES):
        patches.entry(classes, IMPLEMENTATION, classes["eager"])


def replace_mask_factories(patches: Patches, modules: list[ModuleType]) -> None:
    """Replaces the mask factories that the modeling ``modules`` imported, if their bodies are known ones."""
    for module in modules:
        for name, factory in MASK_FACTORIES.items():
            if hasattr(module, name):
                if factory is not _bidirectional:
                    check_body(getattr(module, name))
                patches.attribute(module, name, factory)
