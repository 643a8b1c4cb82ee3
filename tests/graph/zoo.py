"""Tiny random checkpoints of every supported family, written as real Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NO_GQA = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 512}
_FALCON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "alibi": False,
}
_MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
}

_ROUTED = {
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_LONGROPE = _rope(
    "longrope",
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.3 * i for i in range(8)],
    original_max_position_embeddings=128,
    factor=4.0,
)

#: name -> (model type, configuration). Names are the model type, with a suffix for variants.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SIZES),
    "llama_tied": ("llama", {**_SIZES, "tie_word_embeddings": True}),
    "llama_biases": ("llama", {**_SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": ("llama", {**_SIZES, "head_dim": 24, "vocab_size": 251}),
    "llama_rope_llama3": ("llama", {**_SIZES, **_LLAMA3}),
    "llama_rope_linear": ("llama", {**_SIZES, **_rope("linear", factor=4.0)}),
    "llama_rope_yarn": (
        "llama",
        {**_SIZES, **_rope("yarn", factor=4.0, original_max_position_embeddings=64)},
    ),
    "qwen2": ("qwen2", _SIZES),
    "qwen2_window": (
        "qwen2",
        {**_SIZES, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**_SIZES, "head_dim": 16}),
    "mistral": ("mistral", {**_SIZES, "sliding_window": 8}),
    "mistral_no_window": ("mistral", {**_SIZES, "sliding_window": None}),
    "ministral3": ("ministral3", {**_SIZES, "head_dim": 16}),
    "phi": ("phi", {**_SIZES, "partial_rotary_factor": 0.5}),
    "phi_qk_norm": ("phi", {**_SIZES, "qk_layernorm": True}),
    "phi3": ("phi3", {**_SIZES, **_IDS, "sliding_window": None}),
    "phi3_longrope": (
        "phi3",
        {**_SIZES, **_IDS, **_LONGROPE, "original_max_position_embeddings": 128, "sliding_window": None},
    ),
    "gemma": ("gemma", {**_SIZES, "head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            **_SIZES,
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3_text": ("gemma3_text", {**_SIZES, **_MIXED, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "gpt2": ("gpt2", _GPT),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "gpt_neox": ("gpt_neox", _NO_GQA),
    "gpt_neox_sequential": ("gpt_neox", {**_NO_GQA, "use_parallel_residual": False}),
    "gpt_neo": (
        "gpt_neo",
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "vocab_size": 256,
            "max_position_embeddings": 512,
            "window_size": 8,
        },
    ),
    "codegen": ("codegen", {**_GPT, "rotary_dim": 8}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 8}),
    "opt": ("opt", {**_NO_GQA, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "opt_projected": (
        "opt",
        {**_NO_GQA, "ffn_dim": 128, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "starcoder2": ("starcoder2", {**_SIZES, "sliding_window": 8}),
    "falcon": ("falcon", {**_FALCON, "multi_query": True, "new_decoder_architecture": False}),
    "falcon_new": ("falcon", {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon_multi_head": (
        "falcon",
        {
            **_FALCON,
            "multi_query": False,
            "new_decoder_architecture": False,
            "parallel_attn": False,
            "bias": True,
        },
    ),
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}),
    "bloom_six_heads": ("bloom", {"hidden_size": 96, "n_layer": 2, "n_head": 6, "vocab_size": 256}),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 256, "max_seq_len": 512}),
    "stablelm": ("stablelm", {**_SIZES, "partial_rotary_factor": 0.5}),
    "stablelm_qk_norm": ("stablelm", {**_SIZES, "qk_layernorm": True, "use_parallel_residual": True}),
    "olmo": ("olmo", {**_SIZES, "clip_qkv": 0.5}),
    "olmo2": ("olmo2", _SIZES),
    "olmo3": ("olmo3", {**_SIZES, **_MIXED}),
    "cohere": ("cohere", _SIZES),
    "cohere_qk_norm": ("cohere", {**_SIZES, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**_SIZES, **_MIXED}),
    "granite": (
        "granite",
        {**_SIZES, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    ),
    "glm": ("glm", {**_SIZES, "head_dim": 16, "pad_token_id": 0}),
    "glm4": ("glm4", {**_SIZES, "head_dim": 16, "pad_token_id": 0}),
    "exaone4": ("exaone4", {**_SIZES, **_MIXED}),
    "smollm3": ("smollm3", {**_SIZES, **_IDS, "num_hidden_layers": 4}),
    "nemotron": ("nemotron", {**_SIZES, "head_dim": 16}),
    "internlm3": ("internlm3", {**_SIZES, "head_dim": 16}),
    "seed_oss": ("seed_oss", {**_SIZES, "head_dim": 16}),
    "ernie4_5": ("ernie4_5", {**_SIZES, "head_dim": 16}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {**_SIZES, "head_dim": 16}),
    "arcee": ("arcee", _SIZES),
    "mixtral": ("mixtral", {**_SIZES, **_EXPERTS}),
    "qwen2_moe": ("qwen2_moe", {**_SIZES, **_QWEN_MOE, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("qwen3_moe", {**_SIZES, **_QWEN_MOE, "norm_topk_prob": True, "head_dim": 16}),
    "olmoe": ("olmoe", {**_SIZES, **_IDS, "num_experts": 6, "num_experts_per_tok": 3}),
    "gpt_oss": ("gpt_oss", {**_SIZES, **_EXPERTS, **_MIXED, "head_dim": 16}),
    "granitemoe": ("granitemoe", {**_SIZES, **_EXPERTS}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {**_SIZES, "head_dim": 16, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**_SIZES, "head_dim": 16, "num_experts": 4, "moe_topk": 2}),
    "flex_olmo": ("flex_olmo", {**_SIZES, **_IDS, "num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("glm4_moe", {**_SIZES, **_ROUTED, "head_dim": 16}),
    "dots1": ("dots1", {**_SIZES, **_ROUTED, **_IDS, "head_dim": 16, "n_group": 1, "sliding_window": 8}),
    "exaone_moe": (
        "exaone_moe",
        {**_SIZES, **_ROUTED, **_IDS, "num_experts": 4, "head_dim": 16, "sliding_window": 8},
    ),
    "minimax_m2": ("minimax_m2", {**_SIZES, **_EXPERTS, **_IDS, "head_dim": 16}),
    "afmoe": ("afmoe", {**_SIZES, **_EXPERTS, **_IDS, "num_experts": 4, "head_dim": 16, "sliding_window": 8}),
    "cohere2_moe": ("cohere2_moe", {**_SIZES, **_QWEN_MOE, **_IDS, "head_dim": 16, "sliding_window": 8}),
    "granitemoeshared": ("granitemoeshared", {**_SIZES, **_EXPERTS, "shared_intermediate_size": 48}),
    "deepseek_v3": ("deepseek_v3", {**_SIZES, **_ROUTED, **_LATENT}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_SIZES, **_ROUTED, **_LATENT}),
    "minicpm3": ("minicpm3", {**_SIZES, **_LATENT}),
    "helium": ("helium", {**_SIZES, "head_dim": 16}),
}


def make_config(name: str, **overrides: Any) -> Any:
    """The transformers configuration ``name``, with fields replaced by ``overrides``."""
    model_type, fields = CONFIGS[name]
    return AutoConfig.for_model(model_type, **{**fields, **overrides})


def make_model(config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """An eager Hugging Face model of ``config`` with random weights: no norm is one, no bias is zero."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager"
    )
    randomize(model, seed)
    return model.eval()


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draws every parameter anew. Prints the seed, so that a failing test names it."""
    print(f"zoo: weights of {type(model).__name__} drawn with seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                # Around what the model starts with: one or zero for norms, zero for biases.
                parameter.add_((0.2 * noise).to(parameter.dtype))
            else:
                parameter.copy_((0.08 * noise).to(parameter.dtype))


def make_checkpoint(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Writes the checkpoint folder of a zoo member and returns the model it was written from.

    ``overrides`` replace configuration fields. The folder holds config.json, generation_config.json and
    model.safetensors; the model runs eagerly in ``dtype``.
    """
    model = make_model(make_config(name, **overrides), dtype=dtype, seed=seed)
    model.save_pretrained(folder)
    return model


def source_model(folder: Path) -> PreTrainedModel:
    """A checkpoint as transformers computes it, eagerly in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def logits_of(model: torch.nn.Module, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits [len(tokens), vocab_size] of one sequence."""
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens]), use_cache=False).logits[0].numpy())


def round_to_int8(folder: Path) -> None:
    """Gives every matrix numbers that are int8 codes times one scale a row: quantizing it loses nothing."""
    model = source_model(folder)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            w = module.weight.data
            module.weight.data = torch.round(w / w.abs().amax(1, keepdim=True) * 127) / 512
    model.save_pretrained(folder)
