"""Running a source model over many sequences at once, its KV cache watched or rounded on the way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..graph.capturing.patches import Patches
from ..graph.quant_plan import CacheFormat, CacheScales
from .grids import GRIDS

_IMPLEMENTATION: Final = "castiron_by_sequence"
#: Fractions of the scale that reaches the largest number of a head, tried for int8; a float needs no search.
_FRACTIONS: Final = (1.0, 0.9, 0.8, 0.7, 0.6)
#: Numbers of a head that the search looks at.
_SAMPLE: Final = 1 << 16


@contextmanager
def attention_by_sequence(model: Any) -> Iterator[None]:
    """Let attention take one sequence of a batch after the other: scores of all at once would be the largest
    thing in memory. Models that write out their attention are not changed.
    """
    config = model.config
    before = config._attn_implementation
    with Patches() as patches:
        patches.entry(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, _IMPLEMENTATION, _by_sequence)
        patches.entry(type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping, _IMPLEMENTATION, eager_mask)
        config._attn_implementation = _IMPLEMENTATION
        try:
            yield
        finally:
            config._attn_implementation = before


def _by_sequence(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    eager = sys.modules[type(module).__module__].eager_attention_forward
    count = len(query)
    outputs = []
    for index in range(count):
        one = slice(index, index + 1)
        mask = attention_mask
        if mask is not None and len(mask) == count:
            mask = mask[one]
        outputs.append(eager(module, query[one], key[one], value[one], mask, **kwargs)[0])
    return torch.cat(outputs), None


class CacheWatch(DynamicCache):
    """Stands in for a KV cache: nothing is kept; each layer's keys and values get scales and are rounded.

    With ``scales`` given those are used, and layers that are not named have scales of 1, as in an engine;
    without, they are made from the largest number of each head.
    """

    def __init__(self, kv_format: CacheFormat, scales: dict[int, CacheScales] | None = None) -> None:
        super().__init__()
        self.kv_format = kv_format
        self.fixed = scales is not None
        self.scales: dict[int, CacheScales] = dict(scales or {})

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] as an attention over the cache will see them."""
        if self.kv_format == "auto":
            return key_states, value_states
        if not self.fixed:
            found = CacheScales(*(_head_scales(x, self.kv_format) for x in (key_states, value_states)))
            self.scales[layer_idx] = found
        ones = (1.0,) * key_states.shape[1]
        scales = self.scales.get(layer_idx, CacheScales(ones, ones))
        return (
            round_cache(key_states, scales.k, self.kv_format),
            round_cache(value_states, scales.v, self.kv_format),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always empty: a window is one pass."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Masks are those of an empty cache."""
        return query_length, 0


def round_cache(x: Tensor, scales: tuple[float, ...], kv_format: CacheFormat) -> Tensor:
    """``x`` [B, H, T, D] as it comes back from the cache; a scale for each head."""
    steps = torch.tensor(scales, dtype=torch.float32)[:, None, None]
    return GRIDS["fp8" if kv_format == "fp8" else "int8"].round(x / steps) * steps


def _head_scales(x: Tensor, kv_format: CacheFormat) -> tuple[float, ...]:
    """A scale for each head of ``x`` [B, H, T, D]."""
    grid = GRIDS["fp8" if kv_format == "fp8" else "int8"]
    heads = x.transpose(0, 1).flatten(1)
    widest = heads.abs().amax(1).clamp_(min=1e-12) / grid.high
    if kv_format == "fp8":
        return tuple(widest.tolist())
    sample = heads[:, :: max(1, heads.shape[1] // _SAMPLE)]
    best, least = widest, torch.full_like(widest, torch.inf)
    for fraction in _FRACTIONS:
        scale = widest * fraction
        error = (grid.round(sample / scale[:, None]) * scale[:, None] - sample).square().sum(1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return tuple(best.tolist())
