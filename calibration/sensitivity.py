"""Mixed precision: which products a model can least do without, and who gets the bits of a budget.

To second order, a change Δy of a product's output costs the loss ½·Σ(g·Δy)² over tokens, with g the gradient
of the loss at that output: the empirical Fisher information, which ModelOpt's own search goes by too. A pass
forwards and backwards over a few sequences measures it for all products at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from castiron.errors import BuildError

from ..graph.reference import SourceModel
from .activations import round_activations
from .grids import GRIDS
from .recipes import Recipe, Scheme
from .rounding import nearest
from .scales import weight_scales
from .sites import InputGroup, Site, replaced
from .texts import Windows

#: Tokens that the gradients are taken over.
_TOKENS: Final = 1024


def needed_bytes(source: SourceModel) -> int:
    """Memory for the weights of the model and the activations that a backward pass keeps, in bytes."""
    return 6 * sum(int(parameter.numel()) for parameter in source.model.parameters())


def check_memory(source: SourceModel) -> None:
    """Raise BuildError where the model is too large to be differentiated on this machine."""
    needed, there = needed_bytes(source), available_bytes()
    if source.streamed or needed > there:
        raise BuildError(
            f"--auto-quantize differentiates the model and needs about {needed / 1e9:,.1f} GB of memory, of "
            f"which {there / 1e9:,.1f} GB are free; use a larger machine, or name sensitive layers with "
            "--exclude"
        )


def available_bytes() -> int:
    """Memory that is free on this machine."""
    return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def assign(
    source: SourceModel, groups: Sequence[InputGroup], recipe: Recipe, bits: float, windows: Windows
) -> dict[InputGroup, Scheme]:
    """The recipe's scheme or its upgrade for each group, within ``bits`` a weight on average."""
    assert recipe.upgrade is not None
    costs = sensitivities(source, groups, recipe.scheme, windows)
    low, high = recipe.scheme.bits_per_weight, recipe.upgrade.bits_per_weight
    sizes = {group: sum(site.shape[0] * site.shape[1] for site in group.sites) for group in groups}
    left = (bits - low) * sum(sizes.values())
    schemes: dict[InputGroup, Scheme] = dict.fromkeys(groups, recipe.scheme)
    for group in sorted(groups, key=lambda one: -costs[one] / sizes[one]):
        price = (high - low) * sizes[group]
        if price <= left:
            schemes[group] = recipe.upgrade
            left -= price
    return schemes


def sensitivities(
    source: SourceModel, groups: Sequence[InputGroup], scheme: Scheme, windows: Windows
) -> dict[InputGroup, float]:
    """Estimated loss, in nats over all tokens, that ``scheme`` costs at each group alone."""
    group_of = {site: group for group in groups for site in group.sites}
    costs = dict.fromkeys(groups, 0.0)

    def product(site: Site, x: Tensor) -> Tensor:
        weight = site.weight()
        y = functional.linear(x, weight, site.bias())
        with torch.no_grad():
            scales = weight_scales(weight, GRIDS[scheme.weight], scheme.group, scheme.scales)
            changed = nearest(weight, scales.start(weight), scales).weight()
            rounded = round_activations(x, scheme.x_format, scheme.x_group)
            change = functional.linear(rounded, changed, site.bias()) - y

        def add(gradient: Tensor) -> None:
            costs[group_of[site]] += 0.5 * float((gradient * change).sum(-1).square().sum())

        y.register_hook(add)  # type: ignore[no-untyped-call]  # torch's own
        return y

    count = max(1, _TOKENS // windows.ids.shape[1])
    embeddings = source.model.get_input_embeddings()
    with replaced(list(group_of), product):
        for row in windows.ids[:count]:
            ids = torch.from_numpy(np.ascontiguousarray(row[None]))
            start = embeddings(ids).detach().requires_grad_()
            logits = source.model(inputs_embeds=start, use_cache=False).logits[0, :-1]
            loss = functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    return costs
