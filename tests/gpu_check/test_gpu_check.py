"""The scripts of benchmarks/gpu_check as far as they work without a GPU: launches run in the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from castiron.build import BuildOptions, build
from castiron.build.trials.triton_on_cpu import interpret_at
from castiron.engines import open_engine
from castiron.engines.program import Kernel, Program
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu_check"))
sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
sys.path.insert(0, str(Path(__file__).parents[1] / "virtual_cuda"))
sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "cuda"))
from gpu_driver import KernelCode
from program_on_gpu import ProgramOnGpu
from rows import Row, format_table, parse_rows
from run_checks import Checks
from time_kernels import groups_of, label, work_of
from virtual_gpu import without_compiler
from zoo import make_checkpoint


class Interpreted:
    """A kernel whose launches run in the interpreter, on the addresses that they are given."""

    def __init__(self, code: KernelCode, kernel: Kernel) -> None:
        self.code = code
        module, _, name = kernel.source.partition(":")
        self.function = getattr(import_module(module), name)
        names = [n for n in self.function.arg_names if n not in kernel.constants]
        self.types = dict(zip(names, kernel.types, strict=True))
        self.constants = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in kernel.constants.items()
        }

    def bind(self, grid: Sequence[int], numbers: Sequence[int | float], scratch: int = 0) -> Any:
        def launch(stream: int) -> None:
            interpret_at(self.function, grid, self.types, numbers, self.constants)

        launch.code = self.code  # type: ignore[attr-defined]
        return launch


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny model of the family that is asked for: its checkpoint and its engine for sm_90."""
    folder = tmp_path_factory.mktemp("gpu_check")
    make_checkpoint(request.param, folder / "model")
    options = BuildOptions(
        targets=("sm_90",), ptx=False, verify="never", max_batch_size=4, max_num_tokens=16, max_seq_len=96
    )
    with without_compiler():
        build(folder / "model", folder / "engine", options)
    return SimpleNamespace(checkpoint=folder / "model", engine=open_engine(folder / "engine"))


def on_cpu(model: SimpleNamespace) -> ProgramOnGpu:
    """The program in the CPU's memory, with the engine's own weights."""
    program: Program = model.engine.program("sm_90")
    kernels = {kernel.name: kernel for kernel in program.kernels}

    def load(code: KernelCode) -> Interpreted:
        return Interpreted(code, kernels[code.name])

    gpu = ProgramOnGpu(model.engine, "sm_90", 512, load, "cpu", 4)
    data = model.engine.weights_path.read_bytes()
    for name, (offset, nbytes) in model.engine.tensors.items():
        stored = torch.frombuffer(bytearray(data[offset : offset + nbytes]), dtype=torch.uint8)
        gpu.weights[name].view(torch.uint8).copy_(stored)
    return gpu


# Of gemma3_text some layers have a window, and blocks of their own.
@pytest.mark.parametrize("model", ["llama", "gemma3_text"], indirect=True)
def test_the_second_reading_of_a_program_computes_the_logits_of_transformers(model: SimpleNamespace) -> None:
    gpu = on_cpu(model)
    gpu.set_step([(9, 0), (1, 0), (4, 0)])
    for step in gpu.program.steps:
        for launch in gpu.launches(step):
            launch(0)
    logits = gpu.read("logits").numpy()
    source = AutoModelForCausalLM.from_pretrained(
        model.checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    ids = gpu.read("token_ids")
    starts = [0, 9, 10, 14]
    for row, (start, end) in enumerate(pairwise(starts)):
        with torch.no_grad():
            wanted = source.eval()(ids[None, start:end].long()).logits[0, -1].numpy()
        # bfloat16 weights and activations through two layers, logits of size two.
        assert np.abs(logits[row] - wanted).max() < 0.06


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_every_op_of_a_step_has_work_and_a_label(model: SimpleNamespace) -> None:
    gpu = on_cpu(model)
    sequences = [(1, 40), (1, 40)]
    gpu.set_step(sequences)
    groups = groups_of(gpu.program.steps, gpu)
    # Of ops that come in several groups, the first: the last layer works on other rows.
    firsts = {steps[0].kernel: steps[0] for steps in reversed(groups.values())}
    works = {kernel: work_of(step, gpu, sequences) for kernel, step in firsts.items()}
    assert all(work.bytes > 0 for work in works.values())
    # Two rows of 64 inputs meet a matrix [2 * 128, 64]: bfloat16 in and out, each weight once.
    assert works["gated_linear"].flops == 2 * 2 * 64 * 256
    assert works["gated_linear"].bytes == 2 * (2 * 64 + 2 * 128 + 64 * 256)
    # Two queries of 4 heads see 41 keys and values of 16 numbers; 2 heads of them are read, in bfloat16.
    attention = works["paged_attention"]
    assert attention.flops == 2 * 2 * 41 * 4 * (16 + 16)
    assert attention.bytes == 2 * 41 * 2 * (16 + 16) * 2 + 2 * (2 * 64 * 2)
    assert label(groups.popitem()[1][0], gpu, ["kernel"])


def test_rows_survive_printing_and_a_cut_off_line_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("section", "name", True, 1.5, "ms", "bandwidth", 0.5, "note")
    row.emit()
    output = "noise\n" + capsys.readouterr().out
    assert parse_rows(output + 'RESULT {"section": "cut') == [row]
    table = format_table([row, Row("section", "other", passed=False, note="why")])
    assert "50% of bandwidth" in table
    assert "FAILED" in table


def test_a_step_that_takes_too_long_is_ended_and_keeps_its_rows(tmp_path: Path) -> None:
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2] / "benchmarks" / "gpu_check")!r})
from rows import Row
Row("section", "first", passed=True).emit()
time.sleep(600)
"""
    checks = Checks(tmp_path, seconds=60, device="cuda")
    rows = checks.run_command([sys.executable, "-c", script], limit=5, check=True, name="slow")
    assert [(row.name, row.passed) for row in rows] == [("first", True), ("slow", False)]
    assert "limit" in rows[1].note


def test_a_check_that_dies_is_a_failure(tmp_path: Path) -> None:
    checks = Checks(tmp_path, seconds=60, device="cuda")
    command = [sys.executable, "-c", "raise SystemExit('no such engine')"]
    (row,) = checks.run_command(command, limit=30, check=True, name="engine")
    assert row.passed is False
    assert "no such engine" in row.note
    (row,) = checks.run_command(command, limit=30, check=False, name="timing")
    assert row.passed is None


def test_what_is_left_when_time_is_over_is_not_run(tmp_path: Path) -> None:
    checks = Checks(tmp_path, seconds=0, device="cuda")
    (row,) = checks.run_command([sys.executable, "-c", "pass"], limit=30, check=True, name="engine")
    assert row == Row("not run", "engine", passed=False, note="no time was left for it")
