"""Which bytes are believed: safetensors headers, indexes and shards, damaged in every way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from castiron.graph.checkpoint import Checkpoint, read_header, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from castiron.errors import CheckpointError

CONFIG = {"model_type": "llama", "vocab_size": 8}


def folder_with(path: Path, shards: dict[str, dict[str, torch.Tensor]], index: Any = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_rows_read_are_those_that_safetensors_wrote_in_every_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = torch.randn(7, 3, 2)
    tensors = {
        str(dtype): base.to(dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8)
    }
    tensors["scalar"] = torch.tensor(1.5)
    with Checkpoint.open(folder_with(tmp_path / "m", {"model.safetensors": tensors})) as checkpoint:
        for name, expected in tensors.items():
            read = checkpoint.read(name)
            assert read.shape == tuple(expected.shape)
            np.testing.assert_array_equal(read.astype(np.float64), expected.double().numpy())
        assert checkpoint.tensors["torch.bfloat16"].dtype == ml_dtypes.bfloat16
        part = checkpoint.read("torch.float16", 2, 5)
        np.testing.assert_array_equal(part, tensors["torch.float16"][2:5].numpy())
        with pytest.raises(ValueError, match="7 rows"):
            checkpoint.read("torch.float16", 2, 8)
        with pytest.raises(CheckpointError, match=r"has no tensor 'torch\.float61'; it has .*torch\.float16"):
            checkpoint.read("torch.float61")


def test_one_buffer_serves_many_reads(tmp_path: Path) -> None:
    weight = torch.randn(10, 4)
    checkpoint = Checkpoint.open(folder_with(tmp_path / "m", {"model.safetensors": {"w": weight}}))
    buffer = np.empty(12, np.float32)
    for start, stop in [(0, 3), (3, 6), (9, 10)]:
        rows = checkpoint.read("w", start, stop, out=buffer)
        assert np.shares_memory(rows, buffer)
        np.testing.assert_array_equal(rows, weight[start:stop].numpy())
    with pytest.raises(ValueError, match="at least 16 elements"):
        checkpoint.read("w", 0, 4, out=buffer)
    assert list(checkpoint.row_chunks("w", 64)) == [(0, 4), (4, 8), (8, 10)]


def test_our_writer_is_read_by_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_safetensors(tmp_path / "w.safetensors", {"a": ("F32", (3, 4), lambda: values)})
    np.testing.assert_array_equal(load_file(tmp_path / "w.safetensors")["a"], values)


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"", b"", None, "not valid JSON"),
        ([], b"", None, "is a list, expected an object"),
        ({"w": 3}, b"", None, "described by a int"),
        ({"w": entry("F32", [2], 0, 8)}, b"1234567", None, "ends at byte"),
        ({"w": entry("F32", [2], 0, 8)}, b"123456789", None, "belong to no tensor"),
        ({"w": entry("F32", [2], 0, 9)}, b"123456789", None, "spans 9 bytes, expected 8"),
        ({"w": entry("F32", [2], 8, 0)}, b"12345678", None, "spans -8 bytes"),
        ({"w": entry("F32", [-2], 0, 8)}, b"12345678", None, r"shape \[-2\]"),
        ({"w": entry("F32", [True], 0, 4)}, b"1234", None, r"shape \[True\]"),
        ({"w": entry("F32", [1 << 61, 1 << 61], 0, 8)}, b"12345678", None, "expected 21267647932558"),
        ({"w": entry("Q9", [2], 0, 8)}, b"12345678", None, "dtype 'Q9'; known are F64"),
        (
            {"w": entry("F32", [2], 0, 8), "v": entry("F32", [2], 4, 12)},
            b"123456789012",
            None,
            "'v' overlaps 'w'",
        ),
        ({"w": entry("F32", [1], 4, 8)}, b"12345678", None, "'w' leaves a gap after the header"),
        ({"w": entry("F32", [2], 0, 8)}, b"12345678", 1 << 40, "header length of 1099511627776"),
        ({"w": entry("F32", [2], 0, 8)}, b"12345678", 1000, "header alone ends at 1008"),
        (b'{"w":1,"w":2}', b"", None, "'w' appears twice"),
        (b"[" * 100_000, b"", None, "not valid JSON"),
    ],
)
def test_a_header_that_lies_is_refused(
    tmp_path: Path, header: Any, data: bytes, length: int | None, message: str
) -> None:
    path = raw_file(tmp_path / "m.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="found 3 bytes"):
        read_header(tmp_path / "m.safetensors")


def test_a_git_lfs_pointer_is_told_from_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_header(tmp_path / "m.safetensors")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_file_ends_in_anything_but_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damage"
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.int8)}, folder / "good.safetensors")
    content = bytearray((folder / "good.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    (folder / "bad.safetensors").write_bytes(content)
    try:
        tensors = read_header(folder / "bad.safetensors")
    except CheckpointError:
        return
    for tensor in tensors.values():
        assert tensor.offset + tensor.nbytes <= len(content)


def test_a_file_cut_after_opening_is_told_while_reading(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {"model.safetensors": {"w": torch.ones(100, 10)}})
    checkpoint = Checkpoint.open(folder)
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(2000)
    with pytest.raises(CheckpointError, match=r"ends at byte 2000.*changed"):
        checkpoint.read("w")


def test_the_index_decides_and_what_it_does_not_name_is_reported(tmp_path: Path) -> None:
    shards = {
        "model-1.safetensors": {"a": torch.ones(2)},
        "model-2.safetensors": {"b": torch.ones(3), "left_over": torch.ones(1)},
        "old.safetensors": {"a": torch.zeros(9)},
    }
    index = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    checkpoint = Checkpoint.open(folder_with(tmp_path / "m", shards, index))
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {"a": (2,), "b": (3,)}
    assert any("left_over" in note and "model-2" in note for note in checkpoint.notes)
    assert any("old.safetensors" in note for note in checkpoint.notes)


def test_a_second_file_beside_the_single_one_is_reported_and_not_used(tmp_path: Path) -> None:
    shards = {"model.safetensors": {"a": torch.ones(2)}, "adapter.safetensors": {"z": torch.ones(2)}}
    checkpoint = Checkpoint.open(folder_with(tmp_path / "m", shards))
    assert set(checkpoint.tensors) == {"a"}
    assert checkpoint.notes == ["ignored adapter.safetensors: model.safetensors is the model"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"a": "model-1.safetensors", "b": "gone.safetensors"}, "1 of 2 files .* missing: gone.safetensors"),
        ({"a": "model-1.safetensors", "x": "model-1.safetensors"}, "places tensor 'x' in model-1"),
        ({"a": "model-1.safetensors", "b": "model-1.safetensors"}, r"model-2\.safetensors does"),
        ({"a": "../model-1.safetensors"}, "expected a name in the same folder|expected a plain name"),
        ({"a": "/etc/passwd"}, "'/etc/passwd'"),
        ({"a": 3}, "'weight_map' must map"),
        ([], "'weight_map' must map"),
    ],
)
def test_an_index_that_contradicts_its_shards_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    shards = {"model-1.safetensors": {"a": torch.ones(2)}, "model-2.safetensors": {"b": torch.ones(2)}}
    if isinstance(index, dict) and "b" in index and index["b"] == "model-1.safetensors":
        index = {**index, "c": "model-2.safetensors"}
        shards["model-2.safetensors"]["c"] = torch.ones(1)
    folder = folder_with(tmp_path / "m", shards, index)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    shards = {"x1.safetensors": {"a": torch.ones(2)}, "x2.safetensors": {"b": torch.ones(2)}}
    with pytest.raises(CheckpointError, match=r"2 safetensors files .*neither model\.safetensors nor"):
        Checkpoint.open(folder_with(tmp_path / "m", shards))


def test_links_of_the_hub_cache_are_resolved(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "abc"
    blob.parent.mkdir()
    save_file({"a": torch.ones(2)}, blob)
    folder = folder_with(tmp_path / "snapshot", {})
    (folder / "model.safetensors").symlink_to(blob)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors["a"].file == blob.resolve()


def test_opening_what_is_no_checkpoint_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "m.gguf").write_bytes(b"GGUF")
    folder_with(tmp_path / "adapter", {"adapter_model.safetensors": {"a": torch.ones(1)}})
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for path, message in [
        (tmp_path / "adapter", "holds an adapter and no model"),
        (tmp_path / "absent", "not found; expected a Hugging Face folder"),
        (tmp_path / "empty", "holds no .*safetensors"),
        (tmp_path / "file.txt", "is a file"),
        (tmp_path / "ggufs", "name the file to build"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(path)


def test_a_hub_id_that_cannot_be_reached_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match=r"some/model: no such local path, and .*no route to host"):
        Checkpoint.open("some/model")
