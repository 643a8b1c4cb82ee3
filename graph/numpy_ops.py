"""The meaning of the castiron ops, as plain numpy functions in float32 (docs/graph.md gives the words).

Weights may have any float type; all arithmetic is in float32, softmax and norms in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

#: Error function, element by element.
erf: Callable[[Array], Array] = np.vectorize(math.erf, otypes=[np.float64])


def f32(x: Array) -> Array:
    """``x`` as float32."""
    return np.asarray(x, np.float32)


def sigmoid(x: Array) -> Array:
    """Logistic function that does not overflow."""
    return np.exp(-np.logaddexp(0.0, -x.astype(np.float64)))


#: docs/program.md's activations, on float64.
CURVES: dict[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "silu": lambda x: x * sigmoid(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_quick": lambda x: x * sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
}


def activation(x: Array, fn: str) -> Array:
    """Element by element; ``fn`` is one of docs/program.md's activations."""
    return f32(CURVES[fn](x.astype(np.float64)))


def linear(
    x: Array,
    w: Array,
    b: Array | None = None,
    residual: Array | None = None,
    fn: str = "none",
    alpha: float = 1.0,
) -> Array:
    """alpha · act(x·wᵀ + b) + residual, x [.., K], w [N, K]."""
    y = f32(x) @ f32(w).T
    y = y if b is None else y + f32(b)
    y = y if fn == "none" else activation(y, fn)
    y = y if alpha == 1.0 else y * np.float32(alpha)
    return f32(y if residual is None else y + residual)


def expert_linear(x: Array, expert_ids: Array, w: Array, b: Array | None, experts: int) -> Array:
    """y[t, j] = w[expert_ids[t, j]] · x[t, j] + b: [T, k, N].

    x [T, K] (for each j the same) or [T, k, K], expert_ids [T, k], w [experts·N, K], b [experts·N].
    """
    matrices = f32(w).reshape(experts, -1, w.shape[1])
    rows = np.broadcast_to(x if x.ndim == 3 else x[:, None], (*expert_ids.shape, w.shape[1]))
    y = np.empty((*expert_ids.shape, matrices.shape[1]), np.float32)
    for expert in np.unique(expert_ids):
        picked = expert_ids == expert
        y[picked] = f32(rows[picked]) @ matrices[expert].T
        if b is not None:
            y[picked] += f32(b).reshape(experts, -1)[expert]
    return y


def mark_places(places: Array, *, width: int) -> Array:
    """One at each of the places along the last axis, nothing elsewhere: [.., g] -> [.., width]."""
    marks = np.zeros((*places.shape[:-1], width), np.float32)
    np.put_along_axis(marks, places, 1, -1)
    return marks


def combine_experts(y: Array, weights: Array) -> Array:
    """The weighted sum over each token's experts: y [T, k, N], weights [T, k] -> [T, N]."""
    return f32(np.einsum("tkn,tk->tn", f32(y), f32(weights)))


def gated_linear(
    x: Array, w_gate: Array, w_up: Array, b_gate: Array | None, b_up: Array | None, fn: str
) -> Array:
    """act(x·w_gateᵀ + b_gate) · (x·w_upᵀ + b_up)."""
    return linear(x, w_gate, b_gate, fn=fn) * linear(x, w_up, b_up)


def norm(
    x: Array,
    w: Array | None,
    b: Array | None,
    eps: float,
    *,
    centered: bool,
    group: int = 0,
    one_plus: bool = False,
) -> Array:
    """RMSNorm, or LayerNorm if ``centered``, over each run of ``group`` channels (0: the whole last axis)."""
    shape = x.shape
    wide = x.astype(np.float64).reshape(*shape[:-1], -1, group or shape[-1])
    if centered:
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    if w is not None:
        wide = wide * (f32(w).astype(np.float64) + (1.0 if one_plus else 0.0))
    if b is not None:
        wide = wide + f32(b)
    return f32(wide.reshape(shape))


def half_table(table: Array, layout: str) -> Array:
    """A cos or sin table [.., R/2] from one of width R in a ``cos_layout``."""
    if layout == "half":
        return table
    return table[..., : table.shape[-1] // 2] if layout == "repeat_block" else table[..., ::2]


def rope(x: Array, cos: Array, sin: Array, style: str) -> Array:
    """Rotates pairs of x [.., D] by cos, sin [.., R/2]; columns past R pass through (docs/program.md)."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if style == "half":
        a, b = turned[..., :half], turned[..., half:]
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
    left, right = a * cos - b * sin, b * cos + a * sin
    if style == "interleaved":
        turned = np.stack([left, right], -1).reshape(turned.shape)
    else:
        turned = np.concatenate([left, right], -1)
    return f32(np.concatenate([turned, rest], -1))


def attention(
    q: Array,
    k: Array,
    v: Array,
    q_positions: Array,
    k_positions: Array,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
    slopes: Array | None = None,
) -> Array:
    """Causal attention. q [Hq, T, D], k [Hkv, S, D], v [Hkv, S, Dv] -> [T, Hq, Dv].

    Key j is visible to query i if j <= i, i - j < window (0: any), i // chunk == j // chunk (0: any).
    ``slopes`` [Hq] adds slope·(j - i) to the scaled score; ``sinks`` [Hq] are scores of a key without value.
    """
    repeat = q.shape[0] // k.shape[0]
    keys, values = np.repeat(k, repeat, 0).astype(np.float64), np.repeat(v, repeat, 0).astype(np.float64)
    scores = q.astype(np.float64) @ keys.transpose(0, 2, 1) * scale
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    i, j = q_positions[:, None], k_positions[None, :]
    if slopes is not None:
        scores = scores + f32(slopes).astype(np.float64)[:, None, None] * (j - i)
    visible = j <= i
    if window:
        visible &= i - j < window
    if chunk:
        visible &= i // chunk == j // chunk
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        sink = f32(sinks).astype(np.float64)[:, None, None]
        top = np.maximum(top, sink)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sink - top)
    return f32((weights / total @ values).transpose(1, 0, 2))
