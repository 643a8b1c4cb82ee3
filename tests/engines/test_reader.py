from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest
from castiron.engines import open_engine
from castiron.engines.manifest import rebuild_command
from edit import copy_engine, edit_manifest, edit_program, read_entries, seal, write_entries
from tiny import INNER, LIMITS, VOCAB, TinyModel

from castiron.errors import EngineError


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    return copy_engine(tiny_engine, tmp_path / "engine")


def refused(folder: Path, *words: str) -> str:
    with pytest.raises(EngineError) as caught:
        open_engine(folder)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def test_an_engine_reads_back_as_it_was_written(tiny_engine: Path) -> None:
    engine = open_engine(tiny_engine)
    model = TinyModel()
    assert engine.name == "tiny"
    assert engine.targets == ["host"]
    assert engine.program("host") == model.program()
    assert engine.manifest.limits == LIMITS
    assert engine.tokenizer_dir is None
    assert engine.graph() == b"\x08\x0agraph"
    assert engine.build_report()["passes"][0]["name"] == "qkv_fusion"
    content = engine.weights_path.read_bytes()
    for source in model.sources():
        offset, nbytes = engine.tensors[source.name]
        assert offset % 64 == 0
        assert content[offset : offset + nbytes] == source.array.tobytes()
    engine.check_hashes()


@pytest.mark.parametrize(
    ("version", "remedy"),
    [("1.7", "upgrade castiron"), ("2.0", "upgrade castiron"), ("0.9", "rebuild the engine")],
)
def test_another_version_is_refused_naming_both_and_the_rebuild_command(
    engine: Path, version: str, remedy: str
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest.update(format_version=version, something_new={"a": 1})
        del manifest["limits"]

    edit_manifest(engine, change)
    build = f"castiron build '/models/tiny model' --output-dir {engine} --overwrite"
    command = f"{build} --target host --dtype float32"
    refused(engine, version, "1.0 to 1.6", remedy, command)


def test_a_version_that_is_no_version_is_refused(engine: Path) -> None:
    texts = ("1", "1.x", "", "1.0.0", "²._", "1" * 400 + ".0", "1.04", "01.4", "1.4\n", " 1.4")
    for bad in (*texts, None, 1.0, ["1.0"]):
        edit_manifest(engine, lambda manifest, bad=bad: manifest.update(format_version=bad))
        refused(engine, "major.minor")


def test_the_command_that_builds_an_engine_again_has_its_options() -> None:
    raw: dict[str, Any] = {
        "model": {"source": "m", "dtype": "float16"},
        "targets": ["sm_80", "sm_90"],
        "limits": {"max_batch_size": 8, "max_seq_len": 512, "max_num_tokens": 64, "max_logit_rows": 64},
        "quantization": {"recipe": "int4-awq", "origin": "recipe", "kv_cache_dtype": "fp8"},
    }
    begin = "castiron build m --output-dir E --overwrite"
    limits = "--max-batch-size 8 --max-seq-len 512 --max-num-tokens 64"
    whole = f"{begin} --target sm_80,sm_90 --dtype float16 {limits} --quantize int4-awq --kv-cache-dtype fp8"
    assert rebuild_command(raw, "E") == whole
    with_adapters = whole.replace(" --quantize", " --max-lora-rank 32 --quantize")
    assert rebuild_command({**raw, "max_lora_rank": 32}, "E") == with_adapters
    # Of a checkpoint that is quantized itself, and of what somebody made up.
    raw["quantization"] = {"recipe": "gguf Q4_0", "origin": "checkpoint", "kv_cache_dtype": "bfloat16"}
    assert rebuild_command(raw, "E") == f"{begin} --target sm_80,sm_90 --dtype float16 {limits}"
    raw = {
        "model": {"source": 7, "dtype": "$(reboot)"},
        "targets": ["; reboot"],
        "limits": 3,
        "quantization": [],
    }
    assert rebuild_command(raw, "E") == begin.replace(" m ", " MODEL ")


def test_a_folder_that_is_no_engine_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "is not a folder")
    refused(tmp_path, "no config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    refused(tmp_path, "not a castiron engine")
    with pytest.raises(EngineError, match="not a folder"):
        open_engine("nul\0byte")
    for no_path in (None, 5, b"engine"):
        with pytest.raises(EngineError, match="expected a path"):
            open_engine(cast(Any, no_path))


@pytest.mark.parametrize("name", ["config.json", "rank0.engine", "rank0.safetensors"])
def test_a_missing_truncated_or_grown_file_is_refused(engine: Path, name: str) -> None:
    content = (engine / name).read_bytes()
    for damaged in (content[:-3], content[: len(content) // 2], b"", content + b"x"):
        (engine / name).write_bytes(damaged)
        refused(engine)
    (engine / name).unlink()
    refused(engine, name)


@pytest.mark.parametrize("name", ["config.json", "rank0.engine", "rank0.safetensors"])
def test_links_folders_and_pipes_in_place_of_files_are_refused(
    engine: Path, name: str, tmp_path: Path
) -> None:
    (engine / name).rename(tmp_path / "elsewhere")
    (engine / name).symlink_to(tmp_path / "elsewhere")
    refused(engine, "not a regular file")
    (engine / name).unlink()
    os.mkfifo(engine / name)
    refused(engine, "not a regular file")
    (engine / name).unlink()
    (engine / name).mkdir()
    refused(engine, "not a regular file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(engine: Path) -> None:
    (engine / "rank0.engine").chmod(0)
    refused(engine, "cannot be read")


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"limits": None},
        {"limits": {**LIMITS.model_dump(), "max_batch_size": 0}},
        {"limits": {**LIMITS.model_dump(), "max_batch_size": "4"}},
        {"limits": {**LIMITS.model_dump(), "max_batch_size": 5}},
        {"targets": []},
        {"targets": ["../host"]},
        {"targets": ["host", "sm_90"]},
        {"quantization": "fp8"},
        {"files": {}},
        {"entries": {}},
        {"special_tokens": {"vocab_size": VOCAB, "vocab_size_used": VOCAB + 1}},
        {"special_tokens": {"vocab_size": VOCAB + 1, "vocab_size_used": VOCAB}},
        {"special_tokens": {"vocab_size": VOCAB, "vocab_size_used": VOCAB, "eos_token_ids": [VOCAB]}},
        {"memory_plan": [{"item": "x", "bytes": -1}]},
    ],
)
def test_a_manifest_that_says_something_else_is_refused(engine: Path, change: dict[str, Any]) -> None:
    edit_manifest(engine, lambda manifest: manifest.update(change))
    refused(engine)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"format":"castiron-engine","format_version":"1.1","x":' + b"9" * 5000 + b"}",
        b'{"format":"castiron-engine","format_version":"1.1","x":NaN}',
        b'{"format":"castiron-engine","format_version":"1.1","x":"\\ud800"}',
    ],
)
def test_a_manifest_that_is_not_one_is_refused(engine: Path, text: bytes) -> None:
    (engine / "config.json").write_bytes(text)
    refused(engine)


def test_a_file_name_may_not_leave_the_folder(engine: Path) -> None:
    for name in ("../secret", "/etc/passwd", "a/b", "..", "", "x\0", "notes.txt"):
        edit_manifest(
            engine,
            lambda manifest, name=name: manifest["files"].update({name: {"size": 1, "sha256": "0" * 64}}),
        )
        refused(engine)
        edit_manifest(engine, lambda manifest, name=name: manifest["files"].pop(name))


def test_a_changed_tokenizer_is_noticed_when_opening_and_a_changed_weight_by_the_hash_check(
    engine: Path,
) -> None:
    (engine / "generation_config.json").write_text('{"temperature": 0.5}')
    edit_manifest(
        engine, lambda m: m["files"].update({"generation_config.json": {"size": 0, "sha256": "0" * 64}})
    )
    seal(engine)
    assert open_engine(engine).generation_config == {"temperature": 0.5}
    (engine / "generation_config.json").write_text('{"temperature": 0.6}')
    refused(engine, "was changed")
    (engine / "generation_config.json").write_text('{"temperature": 0.5}')
    weights = bytearray((engine / "rank0.safetensors").read_bytes())
    weights[-100] ^= 1
    (engine / "rank0.safetensors").write_bytes(weights)
    with pytest.raises(EngineError, match=r"rank0.safetensors is damaged"):
        open_engine(engine).check_hashes()


def test_a_target_that_was_not_built_is_refused_with_the_command_that_builds_it(engine: Path) -> None:
    with pytest.raises(EngineError, match=r"--max-num-tokens \d+ --target sm_90"):
        open_engine(engine).program("sm_90")


def test_a_flipped_bit_in_the_program_is_noticed(engine: Path) -> None:
    raw = bytearray((engine / "rank0.engine").read_bytes())
    raw[100] ^= 4
    (engine / "rank0.engine").write_bytes(raw)
    refused(engine, "damaged")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("extra/../../x", zipfile.ZIP_STORED),
        ("/abs", zipfile.ZIP_STORED),
        ("UPPER", zipfile.ZIP_STORED),
        ("a//b", zipfile.ZIP_STORED),
        ("a\\b", zipfile.ZIP_STORED),
        ("folder/", zipfile.ZIP_STORED),
        ("umläut", zipfile.ZIP_STORED),
        ("extra", zipfile.ZIP_DEFLATED),
        ("extra", zipfile.ZIP_LZMA),
    ],
)
def test_zip_entries_that_castiron_would_not_write_are_refused(engine: Path, name: str, method: int) -> None:
    entries = read_entries(engine)
    write_entries(engine, {**entries, name: bytes(1000)}, method)
    refused(engine)


def test_a_zip_with_duplicate_hidden_or_overlapping_entries_is_refused(engine: Path) -> None:
    file = engine / "rank0.engine"
    entries = read_entries(engine)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(file, "a") as archive:
        archive.writestr("graph.onnx", b"other")
    seal(engine)
    refused(engine, "duplicate")
    write_entries(engine, entries)
    raw = file.read_bytes()
    file.write_bytes(b"hidden" + raw)
    seal(engine)
    refused(engine)
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
        archive.comment = b"hello"
    seal(engine)
    refused(engine, "does not end")


def test_a_zip_bomb_is_refused_without_being_unpacked(engine: Path) -> None:
    entries = read_entries(engine)
    write_entries(engine, {**entries, "host/program.json": bytes(50_000_000)}, zipfile.ZIP_DEFLATED)
    refused(engine, "compressed")


def test_an_oversized_entry_is_refused_before_it_is_read(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castiron.engines.reader._MAX_PROGRAM", 100)
    refused(engine, "at most 100")


def change_value(name: str, /, **fields: Any) -> Any:
    def change(program: dict[str, Any]) -> None:
        next(value for value in program["values"] if value["name"] == name).update(fields)

    return change


def change_step(index: int, **fields: Any) -> Any:
    return lambda program: program["steps"][index].update(fields)


def change_modules(by_step: dict[int, list[dict[str, Any]]]) -> Any:
    def change(program: dict[str, Any]) -> None:
        for index, modules in by_step.items():
            program["steps"][index]["modules"] = modules

    return change


def change_attr(index: int, **attrs: Any) -> Any:
    return lambda program: program["steps"][index]["attrs"].update(attrs)


def module(name: str, column: int, count: int, row: int = 0) -> dict[str, Any]:
    return {"module": name, "column": column, "row": row, "count": count}


def change_weight(name: str, /, **fields: Any) -> Any:
    def change(program: dict[str, Any]) -> None:
        next(weight for weight in program["weights"] if weight["name"] == name).update(fields)

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (change_value("x", offset=32), "aligned"),
        (change_value("x", offset=1 << 20), "arena"),
        (change_value("x", shape=["T", 1 << 40]), "arena"),
        (change_value("x", shape=[1 << 40] * 6), "arena"),
        (change_value("x", shape=[]), "values"),
        (change_value("x", shape=["Z"]), "values"),
        (change_value("x", name="n0"), "two values"),
        (change_value("x", column=3), "aligned"),
        (change_value("q", base="nothing"), "no base"),
        (change_value("q", base="k"), "no base"),
        (change_value("q", base="q"), "no base"),
        (change_value("q", base="last"), "equal rows"),
        (change_value("q", column=60), "past the columns"),
        (change_value("q", dtype="i32"), "dtype"),
        (change_value("token_ids", dtype="f32"), "token_ids"),
        (change_value("logits", shape=["T", VOCAB]), "logits"),
        (change_value("logits", name="logit"), "unknown"),
        (change_step(0, kernel="rm_rf"), "lacks"),
        (change_step(0, inputs=["nothing"]), "before anything wrote it"),
        (change_step(0, inputs=["x2"]), "before anything wrote it"),
        (change_step(0, inputs=[]), "inputs"),
        (change_step(0, weights=["nothing"]), "unknown weight"),
        (change_step(0, outputs=["nothing"]), "unknown"),
        (change_step(0, outputs=["q"]), "view"),
        (change_step(0, outputs=["token_ids"]), "input"),
        (change_step(0, extra=1), "extra"),
        (change_attr(0, scale="big"), "attribute"),
        (change_attr(0, scale=True), "attribute"),
        (change_attr(0, colour=1), "attribute"),
        (change_attr(7, activation="softmax"), "attribute"),
        (change_attr(4, layer=1), "layer"),
        (change_attr(4, layer=-1), "layer"),
        (change_step(1, modules=[module("norm", 0, 1)]), "only a product"),
        (change_step(2, modules=[module("q", 0, 1 << 40)]), "columns of 'q'"),
        (change_step(2, modules=[module("q", 0, 8), module("k", 7, 8)]), "or twice"),
        (change_step(2, modules=[module("q", 8, 8), module("k", 0, 8)]), "or twice"),
        (change_step(2, modules=[module("q", 0, 0)]), "count"),
        (change_step(2, modules=[module("q", -1, 2)]), "column"),
        (change_step(2, modules=[module("q", 0, 2, row=1 << 41)]), "row"),
        (change_step(7, modules=[module("up", INNER, INNER + 1)]), "columns of 'up'"),
        (change_modules({2: [module("q", 0, 2)], 8: [module("q", 0, 2)]}), "inputs for 'q'"),
        (change_weight("head", name="nothing"), "lacks"),
        (change_weight("head", name="qkv"), "twice"),
        (change_weight("head", dtype="bf16"), "needs a matrix"),
        (change_weight("head", shape=[VOCAB + 20, 32]), "needs"),
        (change_weight("head", shape=[VOCAB, 32, 1]), "needs a matrix"),
        (change_weight("norm0", shape=[64]), "needs"),
        (lambda p: p.update(format=[1, 7]), "format 1.7"),
        (lambda p: p.update(format=[2, 0]), "format 2.0"),
        (lambda p: p.update(target="sm_90"), "contradicts"),
        (lambda p: p.update(arena_bytes=10), "arena"),
        (lambda p: p.update(arena_bytes=-1), "arena_bytes"),
        (lambda p: p.update(kv_layers=[]), "layer"),
        (lambda p: p.update(steps=[]), "logits"),
        (lambda p: p.update(vocab_size=7), "vocabulary"),
        (lambda p: p["limits"].update(max_num_tokens=17), "contradicts"),
    ],
)
def test_an_inconsistent_program_is_refused(engine: Path, change: Any, word: str) -> None:
    edit_program(engine, change)
    refused(engine, word)


def test_a_broken_program_entry_is_refused(engine: Path) -> None:
    entries = read_entries(engine)
    for text in (b"", b"[]", b"{", b"[" * 100_000, b'{"format":[1,0]}', b"\xff"):
        write_entries(engine, {**entries, "host/program.json": text})
        refused(engine, "program.json")
    del entries["host/program.json"]
    write_entries(engine, entries)
    refused(engine, "program.json")


def test_a_program_that_is_not_asked_for_is_checked_when_it_is(engine: Path) -> None:
    edit_program(engine, lambda p: p.update(arena_bytes=0))
    opened = open_engine(engine, every_program=False)
    assert opened.targets == ["host"]
    with pytest.raises(EngineError, match="of an arena of 0"):
        opened.program("host")


def test_broken_golden_outputs_are_refused_when_read(engine: Path) -> None:
    entries = read_entries(engine)
    for data in (b"", b"x" * 7, (1 << 60).to_bytes(8, "little"), entries["golden.safetensors"][:-4]):
        write_entries(engine, {**entries, "golden.safetensors": data})
        with pytest.raises(EngineError):
            open_engine(engine).golden()
