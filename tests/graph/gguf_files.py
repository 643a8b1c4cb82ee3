"""GGUF files of tiny Llama models, written with the gguf package in llama.cpp's order of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

Array = npt.NDArray[Any]
HEADS, WIDTH = 2, 64
TOKENS = [*bytes_to_unicode().values(), "12", "Ġa", "<|end|>"]
END = len(TOKENS) - 1


@dataclass(frozen=True)
class Blocks:
    """A matrix in GGUF blocks: type and bytes [N, row bytes], rows in the order of the transformers model."""

    kind: str
    raw: Array


def tiny_llama(width: int = WIDTH, intermediate: int = 96) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=len(TOKENS),
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


def half_to_pairs(weight: Array) -> Array:
    """llama.cpp rotates neighbouring pairs: rows of q and k are stored in that order."""
    return weight.reshape(HEADS, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: PreTrainedModel, pre: str = "smollm", blocks: Mapping[str, Blocks] | None = None
) -> Path:
    """Write a model as llama.cpp's converter does, the parameters in ``blocks`` as given."""
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3])
    writer.add_token_merges(["1 2", "Ġ a"])
    writer.add_eos_token_id(END)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight").replace("model.layers.0.", "")
        packed = (blocks or {}).get(name)
        values = tensor.numpy() if packed is None else packed.raw
        if module.endswith(("q_proj", "k_proj")):
            values = half_to_pairs(values)
        target = f"{'blk.0.' if 'layers.0' in name else ''}{names[module]}.weight"
        kind = None if packed is None else gguf.GGMLQuantizationType[packed.kind]
        writer.add_tensor(target, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str, rows: int, inputs: int, seed: int) -> Array:
    """Blocks [rows, row bytes] of random bytes whose float16 scales make weights of ordinary size."""
    type = gguf.GGMLQuantizationType[kind]
    width, nbytes = gguf.GGML_QUANT_SIZES[type]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * inputs // width, nbytes)).astype(np.uint8)
    # Places of the scales (ggml-common.h), and how large the codes below them are
    first, count, size = {
        "Q4_K": (0, 2, 8 * 32),
        "Q5_K": (0, 2, 16 * 32),
        "Q6_K": (208, 1, 16 * 64),
        "Q4_1": (0, 2, 8),
        "Q5_1": (0, 2, 16),
        "Q8_0": (0, 1, 64),
    }.get(kind, (0, 1, 8))
    scales = (rng.uniform(0.5, 1.5, (len(raw), count)) * 0.1 / size).astype(np.float16)
    raw[:, first : first + 2 * count] = scales.view(np.uint8)
    return raw.reshape(rows, -1)
