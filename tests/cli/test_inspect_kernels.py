"""castiron inspect --kernels on a fat engine made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from castiron.engines.kernel_load import Occasion, kernel_loads
from click.testing import CliRunner
from tiny import DIM, HIDDEN, KV_HEADS, VOCAB, write_tiny_engine
from tiny_cuda import add_cuda, program

from castiron.cli import main


@pytest.fixture(scope="module")
def fat_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_engine(tmp_path_factory.mktemp("fat") / "engine", more=add_cuda)


def test_the_table_shows_resources_and_launches(fat_engine: Path) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["inspect", str(fat_engine), "--kernels"])
    assert result.exit_code == 0, result.output
    assert "Kernels of sm_80" in result.output
    row = next(line for line in result.output.splitlines() if "rows.0" in line)
    for word in ("128", "40", "50%", "mma", "×2"):
        assert word in row


def test_json_holds_the_same_for_scripts(fat_engine: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(fat_engine), "--kernels", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == ["sm_80"]
    assert found["sm_80"]["occasions"]["prefill"] == {"tokens": 16, "context": 16}
    rows = found["sm_80"]["kernels"][0]
    assert (rows["registers"], rows["spills"], rows["decode"]["launches"]) == (40, 0, 2)


def test_a_host_engine_is_told_to_have_none(tiny_engine: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(tiny_engine), "--kernels"])
    assert result.exit_code == 2
    assert "was built for host" in result.output


def test_loads_are_counted_by_hand() -> None:
    """At 3 tokens: ids and rows of x and of the table; the second table is read whole, as a matrix."""
    rows, store = kernel_loads(program(), Occasion(tokens=3, context=3, prefill_tile=16))
    assert (rows.launches, store.launches) == (2, 1)
    embedding = 3 * 4 + 3 * HIDDEN * 4 + 3 * HIDDEN * 4
    head = 4 + VOCAB * 4 + 96 * (DIM // 2) * 4
    assert rows.bytes == embedding + head
    assert rows.flops == 2 * 96 * (DIM // 2)
    assert store.bytes == 3 * KV_HEADS * DIM * 4


def test_launches_that_do_not_happen_are_not_counted() -> None:
    changed = program().model_dump()
    changed["steps"][1]["launches"][0]["grid"] = [{"of": "P", "per": 1, "times": 1, "per_sm": 0}]
    given = type(program()).model_validate_json(json.dumps(changed))
    decode, prefill = (
        kernel_loads(given, Occasion(tokens=count, context=20, prefill_tile=16)) for count in (1, 16)
    )
    assert (decode[1].launches, prefill[1].launches) == (0, 1)
