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
from gguf_files import END, Blocks, tiny_llama, write_gguf
from tokenizers import Tokenizer

from castiron.errors import CheckpointError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    name = "model.layers.0.mlp.up_proj.weight"
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quants.quantize(model.state_dict()[name].numpy(), kind)
    file = write_gguf(tmp_path / "m.gguf", model, blocks={name: Blocks("Q8_0", raw)})
    np.testing.assert_array_equal(Checkpoint.open(file).read(name), gguf.quants.dequantize(raw, kind))


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


@pytest.mark.parametrize(
    ("keep", "what"),
    [
        *((keep, "begins with b'GG") for keep in (2, 3)),
        (0, "begins with b''"),
        (4, "its version ends at byte 8"),
        (20, "the number of its metadata ends at byte 24"),
        (40, "entry 1 of"),
        (3000, "of its metadata ends at byte"),
        (4900, "the description of tensor"),
        (150_000, "tensor '"),
        (-1, "tensor '"),
    ],
)
def test_a_gguf_file_that_is_cut_off_is_refused_by_the_place(tmp_path: Path, keep: int, what: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_llama())
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(file)
    message = str(refusal.value)
    assert message.startswith(f"{file}: ")
    assert what in message
    assert "ownload it again" in message
    if keep >= 4 or keep < 0:
        assert f"it has {len(whole[:keep])} bytes" in message


@pytest.mark.parametrize(
    ("at", "bytes_there", "what"),
    [
        (0, b"GGML", "begins with b'GGML', and GGUF files with b'GGUF'"),
        (0, b"version https://git-lfs", "is a git-lfs pointer"),
        (4, b"\0\0\0\3", "is of GGUF version 50331648; read are 2 and 3, little-endian"),
        (8, b"\xff" * 8, "which the installed gguf package does not know"),
        (16, b"\xff" * 8, "of its metadata"),
        (24, b"\xff" * 8, "entry 1 of"),
    ],
)
def test_a_gguf_file_that_was_damaged_is_refused_in_our_words(
    tmp_path: Path, at: int, bytes_there: bytes, what: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_llama())
    raw = bytearray(file.read_bytes())
    raw[at : at + len(bytes_there)] = bytes_there
    file.write_bytes(raw)
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(file)
    assert what in str(refusal.value)
