from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.engines import EngineWriter, Verification, check_output_dir, open_engine
from tiny import IDENTITY, TOKENS, ArraySource, TinyModel, fill_writer, write_tiny_engine

from castiron.errors import BuildError


def contents(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    one, two = write_tiny_engine(tmp_path / "one"), write_tiny_engine(tmp_path / "two")
    assert contents(one) == contents(two) == ["config.json", "rank0.engine", "rank0.safetensors"]
    for name in contents(one):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_parent_folders_are_made_and_an_empty_target_is_used(tmp_path: Path) -> None:
    open_engine(write_tiny_engine(tmp_path / "a" / "b" / "engine"))
    (tmp_path / "empty").mkdir()
    open_engine(write_tiny_engine(tmp_path / "empty"))


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("existing", [False, True])
def test_any_interruption_leaves_nothing_half_written(
    tmp_path: Path, error: BaseException, existing: bool
) -> None:
    target = tmp_path / "engine"
    if existing:
        write_tiny_engine(target)
    before = {name: (target / name).read_bytes() for name in contents(target)} if existing else None

    class Failing(ArraySource):
        def chunks(self) -> Iterator[np.ndarray[Any, Any]]:
            yield self.array[:16]
            raise error

    with pytest.raises(type(error)), EngineWriter(target, overwrite=True) as writer:
        writer.write_weights([Failing("a", "f32", np.zeros(64, np.float32))])
    assert contents(tmp_path) == (["engine"] if existing else [])
    if existing:
        assert {name: (target / name).read_bytes() for name in contents(target)} == before


def test_an_engine_is_replaced_only_on_request(tmp_path: Path) -> None:
    target = write_tiny_engine(tmp_path / "engine")
    with pytest.raises(BuildError, match="--overwrite"), EngineWriter(target):
        pass
    with EngineWriter(target, overwrite=True) as writer:
        fill_writer(writer, TinyModel("bf16"))
    assert open_engine(target).manifest.model.dtype == "bfloat16"
    assert contents(tmp_path) == ["engine"]


def test_a_folder_with_other_files_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BuildError, match="left alone"), EngineWriter(tmp_path, overwrite=True):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_file_or_a_link_in_place_of_the_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(BuildError, match="not a folder"), EngineWriter(tmp_path / name, overwrite=True):
            pass
    with pytest.raises(BuildError), EngineWriter(tmp_path / "file" / "below"):
        pass


def test_a_target_that_fills_up_meanwhile_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "engine"

    def write() -> None:
        with EngineWriter(target) as writer:
            fill_writer(writer, TinyModel())
            target.mkdir()
            (target / "mine").write_text("x")

    with pytest.raises(BuildError, match="left alone"):
        write()
    assert contents(tmp_path) == ["engine"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_folder_that_may_not_be_written_to_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests may run as root, who may write anywhere.
    monkeypatch.setattr("castiron.engines.writer.os.access", lambda path, _: Path(path) != tmp_path)
    engine = tmp_path / "new" / "engine"
    with pytest.raises(BuildError, match=r"cannot be written .* is read-only"):
        check_output_dir(engine, overwrite=False)
    engine.parent.mkdir()
    check_output_dir(engine, overwrite=False)


def test_a_full_disk_is_said_clearly_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def full(fd: int, data: Any) -> int:
        if real(fd, data[:1]) and len(data) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return 1

    monkeypatch.setattr("castiron.engines.weights_writer.os.write", full)
    with pytest.raises(BuildError, match="disk is full"):
        write_tiny_engine(tmp_path / "engine")
    assert contents(tmp_path) == []


def test_too_little_space_is_noticed_before_anything_is_packed(tmp_path: Path) -> None:
    class Huge(ArraySource):
        @property
        def nbytes(self) -> int:
            return 1 << 60

        @property
        def stored_shape(self) -> list[int]:
            return [1 << 58]

        def chunks(self) -> Iterator[np.ndarray[Any, Any]]:
            raise AssertionError("packed")

    with pytest.raises(BuildError, match="free"), EngineWriter(tmp_path / "engine") as writer:
        writer.write_weights([Huge("a", "f32", np.zeros(1, np.float32))])


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_unwritable_parent_is_said_clearly(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BuildError, match="cannot be written"), EngineWriter(tmp_path / "engine"):
        pass


def test_a_read_only_file_system_is_said_clearly() -> None:
    with pytest.raises(BuildError), EngineWriter("/proc/castiron/engine"):
        pass


def test_an_unfinished_engine_is_not_put_in_place(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="not finished"), EngineWriter(tmp_path / "engine") as writer:
        writer.add_program(TinyModel().program())
    with pytest.raises(BuildError, match="needs at least"), EngineWriter(tmp_path / "engine") as writer:
        writer.finish(model=IDENTITY, special_tokens=TOKENS, memory_plan=[])
    assert contents(tmp_path) == []


def test_tokenizer_files_are_copied_and_the_hf_config_is_renamed(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "model.safetensors",
        "chat_template.jinja",
    ):
        (model_dir / name).write_text('{"from": "hf"}')
    with EngineWriter(tmp_path / "engine") as writer:
        copied = writer.copy_tokenizer(model_dir)
        writer.add_file("special_tokens_map.json", b"{}")
        fill_writer(writer, TinyModel())
    expected = {"hf_config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"}
    assert set(copied) == expected
    engine = open_engine(tmp_path / "engine")
    assert set(engine.manifest.files) == expected | {
        "special_tokens_map.json",
        "rank0.engine",
        "rank0.safetensors",
    }
    assert engine.tokenizer_dir == tmp_path / "engine"
    assert (tmp_path / "engine" / "hf_config.json").read_text() == '{"from": "hf"}'


def test_a_verification_is_recorded_before_the_engine_appears(tmp_path: Path) -> None:
    verification = Verification(passed=True, max_abs_error=1e-6, mean_kl=0.0, top1_agreement=1.0, rows=9)
    with EngineWriter(tmp_path / "engine") as writer:
        fill_writer(writer, TinyModel())
        assert open_engine(writer.path).manifest.golden is not None
        writer.record_verification(verification)
        assert not (tmp_path / "engine").exists()
    golden = open_engine(tmp_path / "engine").manifest.golden
    assert golden is not None
    assert golden.verification == verification


def test_the_engine_gets_the_permissions_of_any_new_folder(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    engine = write_tiny_engine(tmp_path / "engine")
    assert engine.stat().st_mode == (tmp_path / "plain").stat().st_mode
