"""GGUF files, written here with the gguf package from a transformers model, come back as that model."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from castiron.graph.checkpoint import Checkpoint
from castiron.graph.reference import SourceModel
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from castiron.errors import CheckpointError

HEADS, WIDTH = 2, 64
TOKENS = [*bytes_to_unicode().values(), "12", "Ġa", "<|end|>"]
END = len(TOKENS) - 1


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny_llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=len(TOKENS),
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


def half_to_pairs(
    weight: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """llama.cpp rotates neighbouring pairs: rows of q and k are stored in that order."""
    return weight.reshape(HEADS, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: PreTrainedModel, pre: str = "smollm", quantized: bool = False) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(WIDTH)
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
        values = tensor.numpy()
        if module.endswith(("q_proj", "k_proj")):
            values = half_to_pairs(values)
        target = f"{'blk.0.' if 'layers.0' in name else ''}{names[module]}.weight"
        if quantized and module.startswith("mlp"):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(tmp_path: Path) -> None:
    model = tiny_llama()
    checkpoint = Checkpoint.open(write_gguf(tmp_path / "m.gguf", model))
    ids = np.arange(20)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(SourceModel(checkpoint).logits(ids, ids), expected, atol=2e-6)
    assert checkpoint.eos_token_ids == (END,)
    assert any("m.gguf read through its safetensors form" in note for note in checkpoint.notes)
    assert "quantization_config" not in checkpoint.config
    checkpoint.account({checkpoint.resolve(name).name for name, _ in model.named_parameters()})


def test_dequantized_weights_keep_every_bit(tmp_path: Path) -> None:
    model = tiny_llama()
    checkpoint = Checkpoint.open(write_gguf(tmp_path / "m.gguf", model, quantized=True))
    name = "model.layers.0.mlp.up_proj.weight"
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(model.state_dict()[name].numpy(), kind)
    np.testing.assert_array_equal(checkpoint.read(name), gguf.quants.dequantize(blocks, kind))


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_the_pre_tokenizer_that_the_file_names_decides_how_digits_are_cut(
    tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    checkpoint = Checkpoint.open(write_gguf(tmp_path / "m.gguf", tiny_llama(), pre))
    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    assert tokenizer.encode("12 a<|end|>").tokens == [*pieces, "Ġa", "<|end|>"]


def test_an_unknown_pre_tokenizer_is_refused_unless_a_tokenizer_lies_beside(
    tmp_path: Path, own_cache: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_llama(), "some-new-rule")
    with pytest.raises(CheckpointError, match=r"pre is 'some-new-rule'.*tokenizer\.json beside"):
        Checkpoint.open(file)
    assert not list(own_cache.rglob("*.json")), "nothing half-converted stays"
    (tmp_path / "tokenizer.json").write_text(json.dumps({"mine": True}))
    checkpoint = Checkpoint.open(file)
    assert json.loads((checkpoint.folder / "tokenizer.json").read_text()) == {"mine": True}


@pytest.mark.parametrize("keep", [0, 3, 40, 3000, -50])
def test_a_damaged_gguf_file_is_refused(tmp_path: Path, keep: int) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_llama())
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        Checkpoint.open(file)
