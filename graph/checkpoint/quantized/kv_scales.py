"""Scales of the KV cache that checkpoints store beside the attention's projections."""

from __future__ import annotations

from collections.abc import Mapping

from .module import Module


def kv_scales(modules: Mapping[str, Module]) -> tuple[frozenset[str], dict[str, float], dict[str, float]]:
    """Stored names, and the scales of keys and of values by attention module.

    Either at the attention ("...self_attn.k_scale") or at the projection ("...self_attn.k_proj.k_scale").
    """
    used: set[str] = set()
    found: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for name, module in modules.items():
        for scales, suffix in zip(found, ("k_scale", "v_scale"), strict=True):
            if suffix in module:
                attention = name.removesuffix(f".{suffix[0]}_proj")
                scales[attention] = module.scalar(suffix)
                used.add(module.peek(suffix).name)
    return frozenset(used), *found
