from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy_core import NumpyRunner
from tiny import TinyModel

from castiron.cli import main


class Runner(NumpyRunner):
    """In place of CoreRunner: the numpy model, wrong on request."""

    wrong = False

    def __init__(self, engine: Any, tokens: int, options: Any) -> None:
        super().__init__(TinyModel(), (lambda logits, _: np.roll(logits, 1, -1)) if self.wrong else None)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.shutdown()


@pytest.fixture(autouse=True)
def runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castiron.runtime.verify.CoreRunner", Runner)


def test_a_good_engine_exits_with_0(tiny_engine: Path) -> None:
    result = CliRunner().invoke(main, ["verify", str(tiny_engine)])
    assert result.exit_code == 0, result.output
    assert "verified" in result.stdout
    result = CliRunner().invoke(main, ["verify", str(tiny_engine), "--json"])
    found = json.loads(result.stdout)
    assert found["passed"] is True
    assert found["hashes"] == "match"
    assert found["top1_agreement"] == 1
    assert found["max_abs_error"] == 0


def test_a_wrong_answer_exits_with_1(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "wrong", True)
    result = CliRunner().invoke(main, ["verify", str(tiny_engine)])
    assert result.exit_code == 1
    assert "failed" in result.stdout
    result = CliRunner().invoke(main, ["verify", str(tiny_engine), "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["passed"] is False
    assert found["problems"]


def test_a_damaged_file_exits_with_1_before_anything_runs(tiny_engine: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(tiny_engine, tmp_path / "engine")
    content = bytearray((engine / "rank0.safetensors").read_bytes())
    content[-1] ^= 1
    (engine / "rank0.safetensors").write_bytes(content)
    result = CliRunner().invoke(main, ["verify", str(engine)])
    assert result.exit_code == 1
    assert "SHA-256 differs" in result.stderr
