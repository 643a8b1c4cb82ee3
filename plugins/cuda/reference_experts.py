"""Mixtures of experts in numpy and float64: what the kernels are tested against (as reference_ops.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .reference_ops import Array, activate


def top_k(x: Array, k: Array | None = None, *, axis: int = -1, **_: Any) -> tuple[Array, Array]:
    """The k largest of each row in descending order, and their places; of equal ones the first, NaN last."""
    assert k is not None
    keys = np.where(np.isnan(x), np.inf, -np.asarray(x, np.float64))
    # A stable sort by two keys: -inf comes before NaN.
    order = np.lexsort((np.broadcast_to(np.arange(x.shape[-1]), x.shape), np.isnan(x), keys), axis=-1)
    places = order[..., : int(np.reshape(k, -1)[0])]
    return np.take_along_axis(x, places, -1), places


def gather_elements(x: Array, places: Array, *, axis: int = -1) -> tuple[Array]:
    """ONNX GatherElements."""
    return (np.take_along_axis(x, places, axis),)


def mark_places(places: Array, *, width: int) -> tuple[Array]:
    """One at each of the places, nothing elsewhere."""
    return ((places[..., None] == np.arange(width)).any(-2).astype(np.float64),)


def combine_experts(outputs: Array, weights: Array) -> tuple[Array]:
    """The sum of a token's outputs [T, k, N] by weights [T, k]."""
    return ((np.asarray(outputs, np.float64) * np.asarray(weights)[..., None]).sum(1),)


def expert_linear(
    x: Array, expert_ids: Array, w: Array, bias: Array | None = None, *, experts: int, **_: Any
) -> tuple[Array]:
    """Token t's outputs j: x [T, K], or its own x [T, k, K], by the matrix of expert_ids[t, j]."""
    matrices = np.asarray(w, np.float64).reshape(experts, -1, x.shape[-1])
    rows = np.asarray(x if x.ndim == 3 else x[:, None], np.float64)
    y = (matrices[expert_ids] @ rows[..., None])[..., 0]
    return (y if bias is None else y + bias.reshape(experts, -1)[expert_ids],)


def expert_gated_linear(
    x: Array,
    expert_ids: Array,
    gate: Array,
    up: Array,
    gate_bias: Array | None = None,
    up_bias: Array | None = None,
    *,
    experts: int,
    activation: str,
    **_: Any,
) -> tuple[Array]:
    """act(gate's outputs) · up's."""
    gated = activate(expert_linear(x, expert_ids, gate, gate_bias, experts=experts)[0], activation)
    return (gated * expert_linear(x, expert_ids, up, up_bias, experts=experts)[0],)
