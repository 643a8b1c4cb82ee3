"""Checkpoint against model: names, ties, leftovers, end-of-sequence ids, conversion. Oracle: transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from castiron.graph.checkpoint import Checkpoint, eos_token_ids
from castiron.graph.checkpoint.config_values import check_values
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from castiron.errors import CheckpointError, UnsupportedModelError

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
}
State = dict[str, torch.Tensor]


def llama(tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=tied))


def saved(model: PreTrainedModel, folder: Path, change: Callable[[State], State] | None = None) -> Path:
    model.save_pretrained(folder)
    if change is not None:
        state = change(load_file(folder / "model.safetensors"))
        save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def edit_config(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def require_all_parameters(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Every parameter resolves to a tensor with the model's numbers, and nothing is left over."""
    used = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stored = checkpoint.resolve(name)
        np.testing.assert_array_equal(checkpoint.read(stored.name), parameter.detach().numpy())
        used.add(stored.name)
    checkpoint.account(used)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_resolves_completely(tmp_path: Path, tied: bool) -> None:
    model = llama(tied)
    checkpoint = Checkpoint.open(saved(model, tmp_path))
    assert checkpoint.tied == tied
    require_all_parameters(checkpoint, model)


def test_a_sharded_checkpoint_resolves_completely(tmp_path: Path) -> None:
    model = llama(False)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    checkpoint = Checkpoint.open(tmp_path)
    assert len({tensor.file for tensor in checkpoint.tensors.values()}) > 2
    require_all_parameters(checkpoint, model)


def test_tensors_saved_from_the_base_model_alone_are_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=8))

    def change(state: State) -> State:
        bare = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
        bare["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # as old versions of transformers stored them
        bare["h.0.attn.masked_bias"] = torch.tensor(-1e9)
        return bare

    checkpoint = Checkpoint.open(saved(model, tmp_path, change))
    require_all_parameters(checkpoint, model)
    used = {checkpoint.resolve(name).name for name, _ in model.named_parameters()}
    assert set(checkpoint.account(used).ignored) == {"h.0.attn.bias", "h.0.attn.masked_bias"}


def test_old_names_follow_transformers_own_renamings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    model = GPTNeoXForCausalLM(config)

    def change(state: State) -> State:
        return {name.replace("lm_head.", "embed_out."): tensor for name, tensor in state.items()}

    checkpoint = Checkpoint.open(saved(model, tmp_path, change))
    assert checkpoint.resolve("lm_head.weight").name == "embed_out.weight"
    require_all_parameters(checkpoint, model)


def test_a_tied_head_may_be_stored_under_either_name_or_both(tmp_path: Path) -> None:
    model = llama(True)
    embedding = "model.embed_tokens.weight"
    changes: list[Callable[[State], State]] = [
        lambda s: s,
        lambda s: {**s, "lm_head.weight": s[embedding]},
        lambda s: {"lm_head.weight": s[embedding], **{k: v for k, v in s.items() if k != embedding}},
    ]
    for i, change in enumerate(changes):
        checkpoint = Checkpoint.open(saved(model, tmp_path / str(i), change))
        assert checkpoint.tied
        assert checkpoint.resolve("lm_head.weight") == checkpoint.resolve(embedding)
        require_all_parameters(checkpoint, model)


def test_a_head_that_differs_from_the_embedding_it_is_said_to_be_is_refused(tmp_path: Path) -> None:
    folder = edit_config(saved(llama(False), tmp_path), tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings=true, but 'lm_head.weight' and .*differ"):
        Checkpoint.open(folder).resolve("lm_head.weight")


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = edit_config(saved(llama(True), tmp_path), tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings=false, but only .*embed_tokens"):
        Checkpoint.open(folder).resolve("model.norm.weight")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        *(("max_position_embeddings", v, "an integer from 1") for v in (-5, 0, 10**12, 2.5, True, "128")),
        *(("dtype", v, "the name of a dtype") for v in (5, 0, True, 1.5, "7", "", ["bfloat16", 3])),
        *(("torch_dtype", v, "the name of a dtype") for v in (5, "nope")),
        *(("hidden_size", v, "an integer from 1") for v in (-5, 0, 1.5, "16", False)),
        *(("num_key_value_heads", v, "an integer from 1") for v in (-5, 0, [2, -1])),
        *((name, -5, "an integer from 1") for name in ("head_dim", "n_head", "vocab_size", "n_inner")),
        *(("sliding_window", v, "an integer of at least 1, or null") for v in (-1, 2.0, True, "all")),
        *(("rms_norm_eps", v, "a number from 0 to below 1") for v in (-1e-5, float("nan"), "1e-5", 1e5)),
        *(("rope_theta", v, "a number of more than 0") for v in (-5, 0, float("inf"), True, "1e4")),
        *(("tie_word_embeddings", v, "true or false") for v in (0, 1, "false")),
        *(("bos_token_id", v, "a token id") for v in (-5, 1.0, "<s>")),
    ],
)
def test_a_value_that_no_model_has_is_refused_by_file_and_field(
    tmp_path: Path, field: str, value: object, expected: str
) -> None:
    folder = edit_config(saved(llama(False), tmp_path), **{field: value})
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(folder)
    found = value[-1] if isinstance(value, list) else value
    assert str(refusal.value).startswith(
        f"{folder / 'config.json'}: {field} is {found!r}; expected {expected}"
    )
    assert f"correct {field}, or download" in str(refusal.value)


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"factor": -4.0}, "factor is -4.0"),
        ({"factor": True}, "factor is True"),
        ({"factor": "4"}, "factor is '4'"),
        ({"factor": 4.0, "original_max_position_embeddings": -64}, "original_max_position_embeddings is -64"),
        ({"short_factor": [1.0, 0.0]}, "short_factor is 0.0"),
        ({"full_attention": {"rope_theta": -1}}, "full_attention: rope_theta is -1"),
    ],
)
def test_parameters_of_rotary_positions_are_positive_numbers(rope: dict[str, Any], field: str) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(CheckpointError, match=re.escape(field)):
            check_values(
                {name: {"rope_type": "linear", "mscale": 0, "truncate": False, **rope}}, "config.json"
            )


def test_fields_left_to_the_architecture_are_let_be(tmp_path: Path) -> None:
    given = {"head_dim": None, "torch_dtype": None, "sliding_window": None, "bos_token_id": -1}
    assert Checkpoint.open(edit_config(saved(llama(False), tmp_path), **given)).hf_config.head_dim == 8
    check_values({"dtype": {"text_config": "torch.float16"}, "rope_scaling": None}, "config.json")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    def change(state: State) -> State:
        del state["model.layers.1.mlp.up_proj.weight"]
        return state

    checkpoint = Checkpoint.open(saved(llama(False), tmp_path, change))
    with pytest.raises(CheckpointError, match=r"no stored tensor for .*layers\.1\.mlp\.up_proj.*incomplete"):
        checkpoint.resolve("model.layers.1.mlp.up_proj.weight")


def test_a_tensor_without_a_place_is_an_error(tmp_path: Path) -> None:
    model = llama(False)
    bias = "model.layers.0.self_attn.q_proj.bias"
    checkpoint = Checkpoint.open(saved(model, tmp_path, lambda s: {**s, bias: torch.ones(16)}))
    used = {checkpoint.resolve(name).name for name, _ in model.named_parameters()}
    with pytest.raises(CheckpointError, match=r"1 stored tensors have no place in Llama.*q_proj\.bias"):
        checkpoint.account(used)
    assert checkpoint.account(used, {bias: "zero"}).ignored == {bias: "zero"}
    with pytest.raises(CheckpointError, match="not stored: nowhere"):
        checkpoint.account({*used, "nowhere"})


def test_known_leftovers_are_ignored_with_their_reason(tmp_path: Path) -> None:
    model = llama(False)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.2.mlp.up_proj.weight": torch.ones(24, 16),
        "mtp.norm.weight": torch.ones(16),
    }
    folder = saved(model, tmp_path, lambda s: {**s, **extra})
    checkpoint = Checkpoint.open(edit_config(folder, num_nextn_predict_layers=1))
    used = {checkpoint.resolve(name).name for name, _ in model.named_parameters()}
    reasons = checkpoint.account(used).ignored
    assert set(reasons) == set(extra)
    assert "extra prediction layer" in reasons["model.layers.2.mlp.up_proj.weight"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_a_weight_in_a_type_that_needs_scales_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.norm.weight"
    checkpoint = Checkpoint.open(
        saved(llama(False), tmp_path, lambda state: {**state, name: state[name].to(dtype)})
    )
    with pytest.raises(
        CheckpointError, match=rf"'{name}' is stored as (float8|int32).*expected one of float64"
    ):
        checkpoint.resolve(name)


def test_a_shape_that_the_config_does_not_give_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(saved(llama(False), tmp_path))
    with pytest.raises(CheckpointError, match=r"shape \[16\].*\[32\]"):
        checkpoint.resolve_like("model.norm.weight", (32,))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {}, ()),
        ({"eos_token_id": 3}, {}, (3,)),
        ({"eos_token_id": [7, 3]}, {"eos_token_id": 5}, (3, 5, 7)),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 4}}, {"eos_token_id": [4, -1]}, (4,)),
    ],
)
def test_end_of_sequence_ids_are_collected_from_every_place(
    config: dict[str, Any], generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert eos_token_ids({"vocab_size": 10, **config}, generation) == (expected, ())


def test_an_end_of_sequence_id_outside_the_vocabulary_is_left_out_and_told(tmp_path: Path) -> None:
    folder = edit_config(saved(llama(False), tmp_path), eos_token_id=[2, 50256])
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.eos_token_ids == (2,)
    assert any("50256 is outside the vocabulary of 40" in note for note in checkpoint.notes)
    with pytest.raises(CheckpointError, match="eos_token_id holds '2'"):
        eos_token_ids({"eos_token_id": "2"}, {})


def test_other_model_code_than_what_is_built_is_told(tmp_path: Path) -> None:
    folder = saved(llama(False), tmp_path)
    with Checkpoint.open(folder) as plain:
        assert plain.model_class.__name__ == "LlamaForCausalLM"
        assert plain.notes == []
    edit_config(folder, architectures=["FooForCausalLM"])
    with Checkpoint.open(folder) as renamed:
        assert renamed.model_class is plain.model_class
        (note,) = renamed.notes
        assert "the architecture 'FooForCausalLM': built as LlamaForCausalLM, by its model_type" in note
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_foo.FooForCausalLM"})
    with Checkpoint.open(folder) as custom:
        assert custom.model_class is plain.model_class
        (note,) = custom.notes
        assert "(modeling_foo.FooForCausalLM), which is not run: built as LlamaForCausalLM" in note


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_a_pickled_checkpoint_that_is_cut_off_is_told_so(tmp_path: Path, keep: int) -> None:
    file = saved(llama(False), tmp_path) / "pytorch_model.bin"
    (tmp_path / "model.safetensors").unlink()
    torch.save(llama(False).state_dict(), file)
    raw = file.read_bytes()[:keep]
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"pytorch_model.bin: is cut off: it has {len(raw)} bytes"):
        Checkpoint.open(tmp_path)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="is a git-lfs pointer"):
        Checkpoint.open(tmp_path)


def test_configs_that_are_broken_or_unknown_are_refused(tmp_path: Path) -> None:
    folder = saved(llama(False), tmp_path)
    edit_config(folder, model_type="no_such_model")
    with pytest.raises(UnsupportedModelError, match="no_such_model"):
        _ = Checkpoint.open(folder).hf_config
    edit_config(folder, model_type="llama", attention_bias="yes")
    with pytest.raises(UnsupportedModelError, match=r"'attention_bias'.* expected bool, got str"):
        _ = Checkpoint.open(folder).hf_config
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON"):
        Checkpoint.open(folder)
    (folder / "config.json").write_text('{"format": "castiron-engine"}')
    with pytest.raises(CheckpointError, match="is an engine that castiron built"):
        Checkpoint.open(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list"):
        Checkpoint.open(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_folder_with_only_pytorch_bins_is_converted_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, zipped: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = llama(True)
    folder = saved(model, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    state = dict(model.state_dict())
    names = sorted(state)
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    else:
        parts = {f"pytorch_model-{i}.bin": names[i::shards] for i in range(shards)}
        for file, part in parts.items():
            torch.save({name: state[name] for name in part}, folder / file)
        weight_map = {name: file for file, part in parts.items() for name in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint.open(folder)
    assert any("read through its safetensors form" in note for note in checkpoint.notes)
    require_all_parameters(checkpoint, model)
    assert Checkpoint.open(folder).folder == checkpoint.folder, "the second time it is found in the cache"


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = saved(llama(False), tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save({"w": Path("/")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot read it as plain weights"):
        Checkpoint.open(folder)
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "nothing half-converted stays"


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.empty(4, 2, device="meta"), "on the meta device, a shape without numbers"),
        (torch.eye(4).to_sparse(), r"sparse \(torch.sparse_coo\)"),
        (torch.ones(2, dtype=torch.complex64), "of torch.complex64"),
        (torch.ones(2, 2).to(torch.float8_e4m3fn), "of torch.float8_e4m3fn"),
    ],
)
def test_a_tensor_without_plain_numbers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, found: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = saved(llama(False), tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save({"good": torch.ones(2), "w.weight": tensor}, folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=rf"pytorch_model\.bin: tensor 'w\.weight' is {found}; expected"
    ):
        Checkpoint.open(folder)


def test_a_cache_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where a folder is needed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = saved(llama(False), tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save(llama(False).state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"cannot be written.*XDG_CACHE_HOME"):
        Checkpoint.open(folder)
