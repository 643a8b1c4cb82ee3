"""Texts and the windows that are cut from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from castiron.calibration.texts import (
    CALIBRATION_TEXT,
    HELD_OUT_TEXT,
    default_text,
    read_text,
    spread,
    token_windows,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from castiron.errors import BuildError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of whole words, w0 to w999, without special tokens."""
    vocabulary = {f"w{i}": i for i in range(1000)} | {"<s>": 1000}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def _words(folder: Path, count: int) -> Path:
    file = folder / "words.txt"
    file.write_text(" ".join(f"w{i}" for i in range(count)))
    return file


def test_windows_follow_each_other_and_leave_out_the_rest(folder: Path) -> None:
    windows = token_windows(folder, read_text(_words(folder, 103)), 10)
    np.testing.assert_array_equal(windows.ids, np.arange(100).reshape(10, 10))
    assert not windows.begun
    assert windows.predictions == 90


def test_each_window_begins_as_the_tokenizer_begins_a_text(folder: Path) -> None:
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1000)])
    tokenizer.save(str(file))
    windows = token_windows(folder, read_text(_words(folder, 40)), 10, 2)
    np.testing.assert_array_equal(windows.ids, [[1000, *range(9)], [1000, *range(9, 18)]])
    assert windows.begun


def test_calibration_takes_windows_from_all_over_the_text(folder: Path) -> None:
    windows = token_windows(folder, read_text(_words(folder, 800)), 10)
    np.testing.assert_array_equal(spread(windows, 4).ids[:, 0], [0, 200, 400, 600])
    assert spread(windows, 900) is windows


def test_a_folder_is_its_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "third"}) + "\n\n" + json.dumps({"text": "fourth"}))
    assert read_text(tmp_path).content == "first\n\nsecond\n\nthird\n\nfourth"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"  \n", "holds no text"),
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.jsonl", b'{"prompt": "x"}', 'line 1: expected a JSON object with a string "text"'),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BuildError, match=message):
        read_text(tmp_path / name)


def test_missing_and_short_texts_are_refused(folder: Path) -> None:
    with pytest.raises(BuildError, match="no such file"):
        read_text(folder / "nothing.txt")
    with pytest.raises(BuildError, match="has 9 tokens"):
        token_windows(folder, read_text(_words(folder, 9)), 10)


def test_the_texts_that_ship_have_no_paragraph_in_common() -> None:
    calibration, held_out = (default_text(name).content for name in (CALIBRATION_TEXT, HELD_OUT_TEXT))
    shared = {p for p in calibration.split("\n\n") if len(p) > 40} & set(held_out.split("\n\n"))
    assert not shared
    assert len(calibration) > 250_000
    assert len(held_out) > 60_000
