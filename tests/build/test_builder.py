"""A tiny checkpoint becomes an engine; a build that fails leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from castiron.build import BuildOptions, BuildPlan, build, builder
from castiron.engines import open_engine
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from castiron.errors import BuildError, CheckpointError

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from zoo import make_checkpoint

SMALL = {"max_batch_size": 2, "max_num_tokens": 64, "max_seq_len": 96}


class Recorder:
    """Progress that remembers."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.packed = 0
        self.total = 0

    def plan(self, plan: BuildPlan) -> None:
        self.events.append("plan")

    def start(self, phase: str, total: int | None) -> None:
        self.events.append(phase)
        self.total = total or self.total

    def advance(self, amount: int) -> None:
        self.packed += amount

    def note(self, text: str) -> None:
        self.events.append("note")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo") / "tiny-llama"
    make_checkpoint("llama_tied", folder)
    return folder


def test_a_checkpoint_becomes_an_engine_that_agrees_with_its_source(checkpoint: Path, tmp_path: Path) -> None:
    progress = Recorder()
    options = BuildOptions(dtype="float32", dump_graph=tmp_path / "graphs", num_threads=1, **SMALL)
    report = build(checkpoint, tmp_path / "engine", options, progress)
    engine = open_engine(tmp_path / "engine")
    assert engine.manifest.model.name == "tiny-llama"
    assert engine.manifest.limits == report.plan.limits
    assert engine.program("host").vocab_size == 256
    assert progress.events.index("plan") < progress.events.index("pack weights")
    assert progress.packed == progress.total > 0
    assert (tmp_path / "graphs" / "01_clean_up.onnx").is_file()
    assert dict(report.passes)["gather_last_tokens"] == 5
    assert json.loads(json.dumps(report.to_dict()))["limits"]["max_seq_len"] == 96
    size = sum(file.stat().st_size for file in (tmp_path / "engine").iterdir())
    assert size < report.plan.disk_bytes < size + (200 << 10)
    if report.plan.verify:
        assert report.verification is not None
        assert report.verification.passed
        assert engine.manifest.golden is not None
        assert engine.manifest.golden.verification == report.verification
    with pytest.raises(BuildError):  # an engine is replaced on request only
        build(checkpoint, tmp_path / "engine", BuildOptions(**SMALL))


def test_a_dry_run_plans_and_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    report = build(checkpoint, tmp_path / "engine", BuildOptions(dry_run=True, **SMALL))
    assert report.dry_run
    assert list(tmp_path.iterdir()) == []
    items = {item.item: item.bytes for item in report.plan.memory["host"].items}
    # 2 layers, 2 KV heads of 16, keys and values, bfloat16, 32 tokens
    assert items["KV cache, one block"] == 2 * 2 * (16 + 16) * 32 * 2


def test_an_engine_that_disagrees_with_its_source_is_not_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disagree(*_: object) -> None:
        raise BuildError("the engine does not reproduce the source model, so it was not written: row 3")

    monkeypatch.setattr(builder, "_verify", disagree)
    monkeypatch.setattr(builder, "_has_core", lambda: True)
    with pytest.raises(BuildError, match="does not reproduce"):
        build(checkpoint, tmp_path / "engine", BuildOptions(verify="always", **SMALL))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(BuildError, match=r"has 0\.0 MB free"):
        build(checkpoint, tmp_path / "engine", BuildOptions(**SMALL))
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_no_part_of_the_model_uses_stops_the_build(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "extra"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.extra_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].copy()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="extra_proj"):
        build(folder, tmp_path / "engine", BuildOptions(**SMALL))


def test_a_damaged_tokenizer_is_told_before_the_work_begins(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    (folder / "tokenizer.json").write_text('{"model":')
    progress = Recorder()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        build(folder, tmp_path / "engine", BuildOptions(**SMALL), progress)
    assert "capture graph" not in progress.events
    assert not (tmp_path / "engine").exists()


def test_a_tokenizer_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "foreign"
    shutil.copytree(checkpoint, folder)
    Tokenizer(WordLevel({"?": 9999}, unk_token="?")).save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"token id 9999, but config\.json sets vocab_size to 256"):
        build(folder, tmp_path / "engine", BuildOptions(**SMALL))


def test_a_chat_template_that_is_no_jinja_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "template"
    shutil.copytree(checkpoint, folder)
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message }}")
    with pytest.raises(CheckpointError, match=r"template: the chat template is not valid Jinja.*endfor"):
        build(folder, tmp_path / "engine", BuildOptions(**SMALL))


def test_more_layers_than_tensors_are_refused_before_the_model_is_made(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tall"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 1000
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"num_hidden_layers to 1000, but the checkpoint holds \d+ tensors"
    ):
        build(folder, tmp_path / "engine", BuildOptions(**SMALL))


def test_an_engine_with_the_long_rotary_table_is_compared_with_the_source_on_that_table(
    tmp_path: Path,
) -> None:
    # Every golden prompt of 31 tokens is short for transformers (128 positions or fewer), the engine of 512
    # positions rotates by the long table always.
    make_checkpoint("phi3_longrope", tmp_path / "model")
    recorder = Recorder()
    options = BuildOptions(dtype="float32", max_batch_size=2, verify="always")
    report = build(tmp_path / "model", tmp_path / "engine", options, recorder)
    assert report.verification is not None
    assert report.verification.passed
    assert any("long table" in note for note in report.notes)
    assert "note" in recorder.events[recorder.events.index("plan") :]
