from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from castiron.engines import Verification, open_engine
from click.testing import CliRunner
from tiny import LIMITS, write_tiny_engine

from castiron.cli import main
from castiron.errors import UnsupportedModelError

build_package = pytest.importorskip("castiron.build", reason="needs castiron[build]")
from castiron.build.memory import MemoryItem, MemoryPlan  # noqa: E402
from castiron.build.report import BuildPlan, BuildReport  # noqa: E402


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the builder by one that writes the tiny engine; returns the arguments of its calls."""
    seen: list[Any] = []

    def build(model: str, output_dir: Path, options: Any, progress: Any) -> BuildReport:
        seen.append((model, output_dir, options))
        plan = BuildPlan(
            model=model,
            architecture="TinyForCausalLM",
            parameters=9312,
            dtype=options.dtype,
            stored_dtypes=("bfloat16",),
            precision="float32 (weights stored as bfloat16)",
            limits=LIMITS,
            memory={"host": MemoryPlan((MemoryItem("weights", 2048, "packed"), MemoryItem("arena", 1024)))},
            disk_bytes=4096,
            peak_bytes=8192,
            verify=True,
        )
        progress.start("read [checkpoint]", None)
        progress.plan(plan)
        progress.start("pack weights", 100)
        progress.advance(60)
        progress.note("a [note]")
        if not options.dry_run:
            write_tiny_engine(output_dir)
        return BuildReport(
            output_dir=str(output_dir),
            plan=plan,
            passes=(("clean_up", 2), ("fuse_qkv", 3), ("clean_up", 1), ("fold", 0)),
            decisions=({"what": "host: Linear x7", "choice": "host.linear", "why": "cheapest"},),
            notes=("a [note]",),
            phases={"pack weights": 1.25},
            peak_rss_bytes=1 << 20,
            verification=Verification(passed=True, max_abs_error=1e-5, mean_kl=0, top1_agreement=1, rows=9),
            dry_run=options.dry_run,
        )

    monkeypatch.setattr(build_package, "build", build)
    return seen


def test_options_reach_the_builder(calls: list[Any], tmp_path: Path) -> None:
    arguments = [
        "build",
        "some/model",
        "--output_dir",
        str(tmp_path / "e"),
        "--dtype",
        "float32",
        "--target",
        "host",
    ]
    arguments += [
        "--max_batch_size",
        "3",
        "--max-seq-len",
        "50",
        "--max-num-tokens",
        "7",
        "--max-logit-rows",
        "5",
    ]
    arguments += [
        "--verify",
        "never",
        "--num-threads",
        "2",
        "--dump-graph",
        str(tmp_path / "g"),
        "--overwrite",
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    ((model, output_dir, options),) = calls
    assert (model, output_dir) == ("some/model", tmp_path / "e")
    assert options == build_package.BuildOptions(
        targets=("host",),
        dtype="float32",
        max_batch_size=3,
        max_seq_len=50,
        max_num_tokens=7,
        max_logit_rows=5,
        verify="never",
        overwrite=True,
        dump_graph=tmp_path / "g",
        num_threads=2,
    )


def test_the_plan_comes_before_and_the_decisions_after(calls: list[Any], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["build", "m", "-o", str(tmp_path / "e")])
    assert result.exit_code == 0, result.output
    words = [
        "parameters · float32 (weights stored as bfloat16)",
        "Memory plan for host",
        "2.00 KiB",
        "a [note]",
        "clean_up ×3, fuse_qkv ×3",
        "host.linear",
        "1.2 s",
    ]
    words += ["agrees", "Built"]
    places = [result.output.find(word) for word in words]
    assert -1 not in places
    assert places == sorted(places)
    assert "fold" not in result.output
    open_engine(tmp_path / "e")


def test_json_goes_to_stdout_alone(calls: list[Any], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["build", "m", "-o", str(tmp_path / "e"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["verification"]["passed"] is True
    assert found["decisions"][0]["choice"] == "host.linear"
    assert "Memory plan" in result.stderr


def test_a_dry_run_needs_no_folder_and_writes_none(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["build", "m", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "nothing was written" in result.output
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_folder_is_refused_before_torch_is_imported(tiny_engine: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    code = (
        "import sys\nfrom castiron.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print([m for m in ('torch', 'transformers', 'onnx') if m in sys.modules])"
    )
    for folder, word in ((tiny_engine, "--overwrite"), (tmp_path, "left alone")):
        command = [sys.executable, "-c", code, "build", "m", "--output-dir", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert word in done.stderr
        assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [[], ["-o", "x", "--dtype", "int3"], ["-o", "x", "--max-batch-size", "0"], ["-o", "x", "--verify"]],
)
def test_wrong_options_are_usage_errors(calls: list[Any], arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["build", "m", *arguments]).exit_code == 2
    assert calls == []


def test_an_unsupported_model_is_one_red_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedModelError(
            "layers.0.mixer (MambaMixer): a state space layer, which host cannot run yet"
        )

    monkeypatch.setattr(build_package, "build", refuse)
    result = CliRunner().invoke(main, ["build", "m", "-o", str(tmp_path / "e")])
    assert result.exit_code == 1
    assert "error: layers.0.mixer (MambaMixer)" in result.stderr
    assert not (tmp_path / "e").exists()


def test_a_folder_that_is_no_checkpoint_is_one_red_line(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = CliRunner().invoke(main, ["build", str(tmp_path), "-o", str(tmp_path / "e")])
    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert "✗ read checkpoint" in result.stdout
    assert not (tmp_path / "e").exists()
