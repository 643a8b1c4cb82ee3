"""Attention written out in model files, put into the graph's terms by hand.

A few families have an attention that does not go through transformers' attention interface. Each gets a
forward here, installed on the instances of the fake model; the bodies that they stand for are known by hash.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from castiron.errors import UnsupportedModelError

from .attention import MaskSpec
from .source_hash import check_body

Forward = Callable[..., Any]


def override_forwards(model: nn.Module) -> dict[str, str]:
    """Installs the forwards of this file. Returns class -> what it became."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if hasattr(module, "expand_kv"):
            check_body(type(module).expand_kv)
            module.expand_kv = partial(_expand_kv, module)
            found[type(module).__name__] = "keys and values expanded before the cache"
        make = _OVERRIDES.get(type(module).__name__)
        if make is None:
            continue
        for body in _replaced_bodies(module):
            check_body(body)
        module.forward = make(module, name)
        found[type(module).__name__] = "Attention" if "Attention" in type(module).__name__ else "Linear"
    return found


def _replaced_bodies(module: nn.Module) -> list[Callable[..., Any]]:
    kind = type(module)
    helpers = [
        getattr(kind, name)
        for name in ("_split_heads", "_reshape", "_merge_heads", "_attn")
        if hasattr(kind, name)
    ]
    file = sys.modules[kind.__module__]
    slopes = [getattr(file, name) for name in _SLOPE_FUNCTIONS if hasattr(file, name)]
    return [kind.forward, *helpers, *slopes]


_SLOPE_FUNCTIONS = ("_get_alibi_slopes", "build_alibi_tensor", "build_mpt_alibi_tensor")


def _expand_kv(module: Any, latent: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, T, D] of a latent [B, 1, T, rank] and a rotated key that all heads share: the
    model's own, without writing into parts of a tensor.
    """
    shape = (latent.shape[0], latent.shape[2], -1, module.qk_nope_head_dim + module.v_head_dim)
    expanded = module.kv_b_proj(latent).view(shape).transpose(1, 2)
    k, v = torch.split(expanded, [module.qk_nope_head_dim, module.v_head_dim], dim=-1)
    return torch.cat([k, k_rot.expand(-1, k.shape[1], -1, -1)], dim=-1), v


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: object,
    layer: int,
    scale: float,
    slopes: Tensor | None,
    name: str,
    window: int = 0,
) -> Tensor:
    """q [B, Hq, T, D], k and v [B, Hkv, T, D] -> [B, T, Hq·D]."""
    if mask != MaskSpec():
        raise UnsupportedModelError(f"{name} uses the mask {mask}, expected the plain causal one")
    o: Tensor = torch.ops.castiron.attention(q, k, v, None, slopes, layer, scale, window, 0, 0.0)
    return o.reshape(o.shape[0], o.shape[1], o.shape[2] * o.shape[3])


def _falcon_attention(module: Any, name: str) -> Forward:
    if module.config.alibi:
        raise UnsupportedModelError(
            f"{name}: Falcon rounds its ALiBi biases to bfloat16 (positions above 256 included), in the "
            f"source model as in training; castiron's attention has exact slopes and would differ from it"
        )
    rotary = sys.modules[type(module).__module__]
    heads, kv_heads, width = module.num_heads, module.num_kv_heads, module.head_dim

    def forward(
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: object,
        position_ids: Tensor | None = None,
        layer_past: object = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        qkv = module.query_key_value(hidden_states)
        batch, tokens, _size = qkv.shape
        if module.new_decoder_architecture:
            # Per KV head: its query heads, then its key, then its value.
            qkv = qkv.view(batch, tokens, kv_heads, heads // kv_heads + 2, width)
            q = qkv[:, :, :, :-2].reshape(batch, tokens, heads, width)
            k, v = qkv[:, :, :, -2], qkv[:, :, :, -1]
        elif module.multi_query:
            qkv = qkv.view(batch, tokens, heads + 2, width)
            q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]
        else:
            qkv = qkv.view(batch, tokens, heads, 3, width)
            q, k, v = qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        assert position_embeddings is not None
        # Looked up now: while tracing, the model file's function is the recognising one.
        q, k = rotary.apply_rotary_pos_emb(q, k, *position_embeddings)
        o = _attend(q, k, v, attention_mask, module.layer_idx, width**-0.5, None, name)
        return module.dense(o), None

    return forward


def _falcon_linear(module: Any, name: str) -> Forward:
    return lambda x: functional.linear(x, module.weight, module.bias)


def _bloom_attention(module: Any, name: str) -> Forward:
    slopes = sys.modules[type(module).__module__]._get_alibi_slopes(module.num_heads, torch.device("cpu"))
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise UnsupportedModelError(
            f"{name}: slow_but_exact tensor parallelism is not translated; set it to false"
        )
    heads, width = module.num_heads, module.head_dim

    def forward(
        hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: object, **_: object
    ) -> tuple[Tensor, None]:
        qkv = module.query_key_value(hidden_states)
        qkv = qkv.view(qkv.shape[0], qkv.shape[1], heads, 3, width)
        q, k, v = (qkv[..., i, :].transpose(1, 2) for i in range(3))
        o = _attend(q, k, v, attention_mask, module.layer_idx, module.inv_norm_factor, slopes, name)
        return module.dense(o) + residual, None

    return forward


def _mpt_attention(module: Any, name: str) -> Forward:
    alibi = sys.modules[type(module).__module__].build_mpt_alibi_tensor(module.n_heads, 2)
    # Distances 1 and 0 in the last two columns: their difference is the slope.
    slopes = alibi[:, 0, 1] - alibi[:, 0, 0]
    heads, width = module.n_heads, module.head_dim

    def forward(
        hidden_states: Tensor,
        position_bias: Tensor,
        cache: object = None,
        attention_mask: object = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        qkv = module.Wqkv(hidden_states)
        if module.clip_qkv:
            qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        parts = qkv.view(qkv.shape[0], qkv.shape[1], 3 * heads, width).split(heads, 2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        o = _attend(q, k, v, attention_mask, module.layer_idx, float(module.softmax_scale), slopes, name)
        return module.out_proj(o), None

    return forward


def _gpt_neo_attention(module: Any, name: str) -> Forward:
    window = int(module.config.window_size) if module.attention_type == "local" else 0

    def forward(hidden_states: Tensor, attention_mask: object = None, **_: object) -> tuple[Tensor, None]:
        q, k, v = (
            projection(hidden_states).unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        # GPT-Neo does not scale its scores.
        return module.out_proj(
            _attend(q, k, v, attention_mask, module.layer_id, 1.0, None, name, window)
        ), None

    return forward


#: Class name in transformers -> forward for an instance of it.
_OVERRIDES: dict[str, Callable[[Any, str], Forward]] = {
    "FalconAttention": _falcon_attention,
    "FalconLinear": _falcon_linear,
    "BloomAttention": _bloom_attention,
    "MptAttention": _mpt_attention,
    "GPTNeoSelfAttention": _gpt_neo_attention,
}
