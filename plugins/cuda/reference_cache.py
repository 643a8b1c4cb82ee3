"""Cache ops in numpy and float64: what the kernels are tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...graph.fake_quant import fake_quantize
from ...graph.numpy_ops import attention
from ..paged_step import PagedStep

Array = np.ndarray[Any, Any]


def paged_rope(
    x: Array,
    positions: Array,
    cos: Array,
    sin: Array,
    *,
    heads: int,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool = False,
    concat_halves: bool = False,
) -> tuple[Array]:
    """Rotated x [T, heads * head_dim]."""
    y = np.array(x, np.float64).reshape(len(x), heads, head_dim)
    half = rotary_dim // 2
    a_at, b_at = slice(0, half), slice(half, rotary_dim)
    pairs = (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleaved else (a_at, b_at)
    a, b = (y[..., place].copy() for place in pairs)
    c, s = (np.asarray(table, np.float64)[positions][:, None] for table in (cos, sin))
    to = (a_at, b_at) if concat_halves else pairs
    y[..., to[0]], y[..., to[1]] = a * c - b * s, b * c + a * s
    return (y.reshape(len(x), -1),)


def write_kv(
    k: Array,
    v: Array,
    *,
    step: PagedStep,
    kv_format: str = "",
    k_scale: Sequence[float] = (),
    v_scale: Sequence[float] = (),
    **_: Any,
) -> tuple[()]:
    """Store keys and values; with a format as codes, the rounded numbers over their head's scale."""
    for part, rows, scales in ((step.k, k, k_scale), (step.v, v, v_scale)):
        if kv_format:
            by_head = np.repeat(np.asarray(scales, np.float32), part.shape[3])
            rows = fake_quantize(np.asarray(rows, np.float32) / by_head, kv_format, x_scale=1.0)
        step.store(part, rows)
    return ()


def rope_write_kv(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    cos: Array,
    sin: Array,
    *,
    step: PagedStep,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool = False,
    concat_halves: bool = False,
    **rest: Any,
) -> tuple[Array]:
    """Rotate and store keys, store values; rotated q."""

    def rotate(x: Array, heads: int) -> Array:
        return paged_rope(
            x,
            positions,
            cos,
            sin,
            heads=heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            concat_halves=concat_halves,
        )[0]

    write_kv(rotate(k, kv_heads), v, step=step, **rest)
    return (rotate(q, q_heads),)


def paged_attention(
    q: Array,
    sinks: Array | None = None,
    slopes: Array | None = None,
    kv_written: Array | None = None,
    *,
    step: PagedStep,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    k_scale: Sequence[float] = (1.0,),
    v_scale: Sequence[float] = (1.0,),
    **_: Any,
) -> tuple[Array]:
    """Attention of q [T, q_heads * head_dim] over each row's sequence: [T, q_heads * v_head_dim].

    ``k_scale``, ``v_scale``: by KV head, where the cache holds codes.
    """
    out = np.zeros((len(q), q_heads, v_head_dim))
    for seq in range(len(step.kv_len)):
        begin, end = int(step.query_start[seq]), int(step.query_start[seq + 1])
        if begin == end:
            continue
        queries = np.asarray(q[begin:end], np.float64).reshape(end - begin, q_heads, head_dim)
        k = step.held(step.k, seq) * np.asarray(k_scale)[:, None, None]
        v = step.held(step.v, seq) * np.asarray(v_scale)[:, None, None]
        j = np.arange(k.shape[1])
        out[begin:end] = attention(
            queries.transpose(1, 0, 2),
            k,
            v,
            j[len(j) - len(queries) :],
            j,
            scale=scale,
            window=window,
            chunk=chunk,
            softcap=softcap,
            sinks=sinks,
            slopes=slopes,
        )
    return (out.reshape(len(q), -1),)
