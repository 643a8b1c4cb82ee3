"""The quantized reference: the source model with the arithmetic that a plan asks for.

What an engine of that plan should compute, up to the order of sums. Golden outputs come from it, so that an
engine is compared with its own numbers and not with those of the unquantized model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from ..graph.checkpoint import Checkpoint
from ..graph.quant_plan import QuantPlan
from ..graph.reference import SourceModel, Tokens
from .products import plan_weight, rounded_input
from .running import CacheWatch
from .sites import Site, find_experts, find_sites, replaced


class QuantizedModel:
    """``SourceModel`` under a plan; ``logits`` and ``decode`` as there.

    Weights are put together from their codes for each product, so that no more than one is in memory beyond
    what the source model holds; ``keep`` holds all of them, for many passes over a small model.
    """

    def __init__(
        self, source: SourceModel, checkpoint: Checkpoint, plan: QuantPlan, *, keep: bool = False
    ) -> None:
        self.source = source
        self.plan = plan
        sites = find_sites(source.model, checkpoint) + find_experts(source.model, checkpoint)
        self._sites = [site for site in sites if site.stored in plan.linears]
        self._kept: dict[tuple[str, int | None], Tensor] | None = {} if keep else None

    def logits(self, token_ids: Tokens, rows: Tokens) -> npt.NDArray[np.float32]:
        """Logits [len(rows), vocab] at positions ``rows`` of one sequence."""
        with self._quantized():
            if self.plan.kv_format == "auto":
                return self.source.logits(token_ids, rows)
            watch = CacheWatch(self.plan.kv_format, dict(self.plan.kv_scales))
            kept = torch.from_numpy(np.asarray(rows, np.int64))
            ids = torch.from_numpy(np.asarray(token_ids, np.int64)[None])
            with torch.no_grad():
                output = self.source.model(input_ids=ids, use_cache=True, cache=watch, logits_to_keep=kept)
            return np.array(output.logits[0].float().numpy(), np.float32)

    def decode(self, prefix: Tokens, continuation: Tokens) -> npt.NDArray[np.float32]:
        """Logits [len(continuation), vocab] after each token of ``continuation``, fed one by one."""
        with self._quantized():
            if self.plan.kv_format == "auto":
                return self.source.decode(prefix, continuation)
            return self.source.decode(prefix, continuation, cache=_RoundedCache(self.plan))

    @contextmanager
    def _quantized(self) -> Iterator[None]:
        with replaced(self._sites, self._product):
            yield

    def _product(self, site: Site, x: Tensor) -> Tensor:
        plan = self.plan.linears[site.stored]
        key = (site.name, site.expert)
        weight = None if self._kept is None else self._kept.get(key)
        if weight is None:
            weight = plan_weight(plan, site)
            if self._kept is not None:
                self._kept[key] = weight
        return functional.linear(rounded_input(x, plan), weight, site.bias())


class _RoundedCache(DynamicCache):
    """A cache that holds what an engine's would."""

    def __init__(self, plan: QuantPlan) -> None:
        super().__init__()
        self._watch = CacheWatch(plan.kv_format, dict(plan.kv_scales))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Round, then keep."""
        keys, values = self._watch.update(key_states, value_states, layer_idx)
        kept: tuple[Tensor, Tensor] = super().update(keys, values, layer_idx, *args, **kwargs)
        return kept
