"""castiron bench serve as a command, over a server of known delays."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("aiohttp", reason="needs castiron[bench]")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtime"))

import slow_server

from castiron.cli import main


def bench(*args):
    return CliRunner().invoke(main, ["bench", "serve", *map(str, args)])


def test_the_result_has_the_names_that_people_plot(tmp_path):
    plot = tmp_path / "plots" / "run.png"
    with slow_server.serve(slow_server.Behaviour(first_delay=0.02, gap=0.005)) as (url, bodies):
        result = bench(
            *("--base-url", url, "--num_prompts", 6, "--output-len", 4, "--max-concurrency", 3),
            *("--goodput", "ttft:5000", "e2el:9000", "--metric-percentiles", "50,90", "--num-warmups", 2),
            *("--metadata", "gpu=none", "run=1", "--save-detailed", "--result-dir", tmp_path),
            *("--ignore-eos", "--api-key", "k", "--plot", plot),
        )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("============ Serving Benchmark Result ============\n")
    assert "Successful requests:                     6\n" in result.stdout
    assert "Maximum request concurrency:             3\n" in result.stdout
    assert "P90 ITL (ms):" in result.stdout
    assert len(bodies) == 9
    assert all(b["ignore_eos"] and b["model"] == "slow" and b["max_tokens"] == 4 for b in bodies)
    (path,) = tmp_path.glob("openai-infqps-concurrency3-slow-*.json")
    saved = json.loads(path.read_text())
    assert (saved["gpu"], saved["run"], saved["model_id"]) == ("none", "1", "slow")
    assert saved["request_goodput"] == pytest.approx(saved["request_throughput"])
    assert saved["p90_itl_ms"] >= saved["median_itl_ms"] > 0
    assert saved["mean_ttft_ms"] >= 20
    assert saved["output_lens"] == [4] * 6
    assert [len(gaps) for gaps in saved["itls"]] == [3] * 6
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_errors_are_shown_and_a_run_without_success_ends_with_1():
    with slow_server.serve(slow_server.Behaviour(refuse={2})) as (url, _):
        result = bench("--base-url", url, "--num-prompts", 2, "--max-concurrency", 1, "--output-len", 2)
    assert result.exit_code == 0
    assert "1 failed: HTTP 429: the queue is full" in result.stderr
    assert "Failed requests:                         1\n" in result.stdout
    with slow_server.serve(slow_server.Behaviour(refuse={1, 2})) as (url, _):
        result = bench("--base-url", url, "--num-prompts", 2, "--output-len", 2)
    assert result.exit_code == 1
    assert "no request succeeded" in result.stderr


@pytest.mark.parametrize("option", [("--save-result", "--result-dir", "F/x"), ("--plot", "F/x/run.png")])
def test_a_folder_for_results_that_cannot_be_made_is_told_before_measuring(tmp_path, option):
    (tmp_path / "file").write_text("")
    option = [part.replace("F", str(tmp_path / "file"), 1) for part in option]
    with slow_server.serve(slow_server.Behaviour()) as (url, bodies):
        result = bench("--base-url", url, "--num-prompts", 1, *option)
    assert result.exit_code == 1
    assert "results cannot be written to the folder" in result.stderr
    assert bodies == []


def test_json_is_the_only_thing_on_stdout():
    with slow_server.serve(slow_server.Behaviour()) as (url, _):
        result = bench("--base-url", url, "--num-prompts", 3, "--output-len", 2, "--json")
    assert json.loads(result.stdout)["completed"] == 3


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--goodput", "itl:3"), "expected ttft:MS, tpot:MS or e2el:MS"),
        (("--goodput",), "requires an argument"),
        (("--metadata", "x"), "expected NAME=VALUE"),
        (("--metric-percentiles", "101"), "expected a number from 0 to 100"),
        (("--request-rate", "0"), "above 0, or inf"),
        (("--percentile-metrics", "ttft,speed"), "'speed'; expected some of ttft, tpot, itl, e2el"),
        (("--extra-body", "[]"), "expected a JSON object"),
        (("--endpoint", "/v1/embeddings"), "ends in /completions"),
        (("--plot", "x.gif"), "expected a name that ends in .png"),
        (("--dataset-name", "custom"), "give both or neither"),
        (("--base-url", "http://127.0.0.1:9"), "no server answers at"),
    ],
)
def test_bad_options_are_clear_errors(option, message):
    result = bench(*option)
    assert result.exit_code != 0
    assert message in result.stderr
