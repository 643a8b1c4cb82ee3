from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from edit import edit_manifest, read_entries, write_entries
from tiny import write_tiny_engine

from castiron.cli import main


def test_json_holds_what_scripts_ask_for(tiny_engine: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(tiny_engine), "--json", "--steps", "--check"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["format_version"] == "1.6"
    assert found["model"]["architecture"] == "TinyForCausalLM"
    assert found["targets"] == ["host"]
    assert found["limits"]["max_seq_len"] == 96
    assert found["programs"]["host"]["kernels"]["linear"] == 4
    assert len(found["programs"]["host"]["step_list"]) == 12
    assert found["hashes_checked"] is True
    assert found["golden"]["decode_rows"] == 3
    assert found["passes"] == [{"name": "qkv_fusion", "applied": 1}]
    # Sizes by hand: 80·32 + 32·32 + 96·32 + 32·40 + 64·32 floats in panels.
    panels = next(group for group in found["weights"] if group["layout"] == "panel16")
    assert panels["bytes"] == (64 * 32 + 32 * 32 + 96 * 32 + 32 * 40 + 64 * 32) * 4
    assert sum(group["bytes"] for group in found["weights"]) < found["files"]["rank0.safetensors"]


def test_tables_name_model_memory_kernels_and_golden_outputs(tiny_engine: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(tiny_engine)])
    assert result.exit_code == 0, result.output
    for word in (
        "TinyForCausalLM",
        "Memory plan",
        "97.66 KiB",
        "panel16",
        "paged_attention",
        "qkv_fusion",
        "Golden",
    ):
        assert word in result.output
    assert "embedding(token_ids" not in result.output
    result = CliRunner().invoke(main, ["inspect", str(tiny_engine), "--steps"])
    assert "embedding(token_ids <embed>)" in result.output


def test_precision_says_what_weights_are_stored_as(tiny_engine: Path, tmp_path: Path) -> None:
    def shown(engine: Path) -> tuple[str, list[str]]:
        text = CliRunner().invoke(main, ["inspect", str(engine)]).stdout
        found = json.loads(CliRunner().invoke(main, ["inspect", str(engine), "--json"]).stdout)
        line = next(line for line in text.splitlines() if line.strip().startswith("precision"))
        return line.partition("precision")[2].strip(), found["stored_dtypes"]

    assert shown(tiny_engine) == ("float32", ["float32"])
    narrow = write_tiny_engine(tmp_path / "narrow", "bf16")
    assert shown(narrow) == ("bfloat16", ["bfloat16"])
    # A float32 engine of a checkpoint in bf16: float32 is what it computes in.
    edit_manifest(narrow, lambda manifest: manifest["model"].update(dtype="float32"))
    assert shown(narrow) == ("float32 (weights stored as bfloat16)", ["bfloat16"])


def test_check_finds_a_flipped_bit_that_opening_does_not(tiny_engine: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(tiny_engine, tmp_path / "engine")
    content = bytearray((engine / "rank0.safetensors").read_bytes())
    content[-1] ^= 1
    (engine / "rank0.safetensors").write_bytes(content)
    assert CliRunner().invoke(main, ["inspect", str(engine)]).exit_code == 0
    result = CliRunner().invoke(main, ["inspect", str(engine), "--check"])
    assert result.exit_code == 1
    assert "rank0.safetensors is damaged" in result.stderr
    assert "castiron build" in result.stderr


def test_markup_in_a_name_is_shown_as_it_is(tiny_engine: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(tiny_engine, tmp_path / "engine")
    manifest = json.loads((engine / "config.json").read_text())
    manifest["model"]["name"] = "[red]evil[/] [/nothing]"
    (engine / "config.json").write_text(json.dumps(manifest))
    result = CliRunner().invoke(main, ["inspect", str(engine)])
    assert result.exit_code == 0, result.output
    assert "[red]evil[/] [/nothing]" in result.output


@pytest.mark.parametrize("report", [{"passes": 3, "decisions": {"a": 1}}, {"passes": ["x", None, {}]}, {}])
def test_a_build_report_of_any_form_is_shown_as_far_as_it_goes(
    tiny_engine: Path, tmp_path: Path, report: object
) -> None:
    engine = shutil.copytree(tiny_engine, tmp_path / "engine")
    write_entries(engine, {**read_entries(engine), "build_report.json": json.dumps(report).encode()})
    assert CliRunner().invoke(main, ["inspect", str(engine)]).exit_code == 0
