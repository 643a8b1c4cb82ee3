"""Plugin files: how they are read, tried and built with, and what a bad one is told."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from castiron.build import BuildOptions, build
from castiron.build.trials.trial import TrialResult, try_plugin
from castiron.plugins.sdk import load_plugin
from castiron.runtime.model_runner import ModelRunner
from click.testing import CliRunner

from castiron.cli import main
from castiron.errors import BuildError, EngineError

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"
#: y = x² in C++; the tests break it in one place each.
SQUARE = '''
import numpy as np
from castiron.plugins.sdk import *

SOURCE = """
#include "castiron_plugin.h"
extern "C" const char* square(const castiron_call* call) {
    const castiron_tensor &x = call->inputs[0], &y = call->outputs[0];
    for (int64_t row = call->part; row < x.shape[0]; row += call->parts)
        for (int64_t c = 0; c < x.shape[1]; ++c) {
            float v = static_cast<const float*>(x.data)[row * x.row_stride + c];
            static_cast<float*>(y.data)[row * y.row_stride + c] = v * v;
        }
    return nullptr;
}
"""

def lower(op, context):
    launch = KernelLaunch(HostKernel(SOURCE, "square", origin=__file__), (Grid(),), ())
    return Lowering((Call("native", [op.required(0).name], [op.outputs[0].name], launches=(launch,)),))

PLUGIN = Plugin(
    name="square",
    ops=(CustomOp("demo.Square", ("x",), lambda x: [x], lambda x: x * x),),
    tactics=(Tactic("demo.square", "demo.Square", "host", lambda op, context: True, lower, bandwidth_cost),),
    examples=(Example("demo.Square", (("T", 33),), {}),),
)
'''


def plugin_file(folder: Path, *changes: tuple[str, str]) -> Path:
    text = SQUARE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "square.py"
    file.write_text(textwrap.dedent(text))
    return file


def tried(file: Path) -> list[TrialResult]:
    return list(try_plugin(load_plugin(file), file, ["host"]))


def test_a_good_kernel_passes(tmp_path: Path) -> None:
    results = tried(plugin_file(tmp_path))
    assert [result.problem for result in results] == [""]
    assert results[0].error == 0


def test_a_wrong_kernel_is_shown_its_first_wrong_element(tmp_path: Path) -> None:
    (result,) = tried(plugin_file(tmp_path, ("v * v;", "row == 2 && c == 5 ? v : v * v;")))
    assert "1 of 429 elements are off; the first, y0[2, 5]" in result.problem


def test_a_kernel_that_reads_past_its_operand_is_caught(tmp_path: Path) -> None:
    (result,) = tried(plugin_file(tmp_path, ("row < x.shape[0]", "row < x.shape[0] + 400")))
    assert "outside of its operands" in result.problem


def test_a_kernel_that_writes_to_its_input_is_caught(tmp_path: Path) -> None:
    (result,) = tried(plugin_file(tmp_path, ("static_cast<float*>(y.data)", "static_cast<float*>(x.data)")))
    assert "inputs are read-only" in result.problem


def test_a_kernel_that_writes_before_its_output_is_caught(tmp_path: Path) -> None:
    before = "if (row == 0 && c == 0) static_cast<float*>(y.data)[-1] = 0; float v ="
    (result,) = tried(plugin_file(tmp_path, ("float v =", before)))
    assert "wrote outside of y0" in result.problem


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("lambda x: [x], lambda", "lambda x: ['abc'], lambda"), "has the size 'a'; expected a number"),
        (("[op.outputs[0].name]", "['zzz']"), "names 'zzz', which is no operand, result or temporary"),
    ],
)
def test_a_definition_that_makes_no_sense_is_explained(
    tmp_path: Path, change: tuple[str, str], expected: str
) -> None:
    file = plugin_file(tmp_path, change)
    try:
        problems = [result.problem for result in tried(file)]
    except BuildError as error:
        problems = [str(error)]
    assert expected in problems[0]


def test_a_kernel_that_forgets_elements_is_caught(tmp_path: Path) -> None:
    (result,) = tried(plugin_file(tmp_path, ("c < x.shape[1]", "c < x.shape[1] - 1")))
    assert "13 of 429 elements are off" in result.problem


def test_a_source_that_does_not_compile_gets_the_compilers_words_and_the_plugins_file(tmp_path: Path) -> None:
    (result,) = tried(plugin_file(tmp_path, ("float v =", "float w =")))
    assert "cannot compile host kernel 'square'" in result.problem
    assert "square.py:" in result.problem
    assert "‘v’ was not declared" in result.problem or "'v' was not declared" in result.problem


def test_a_kernel_that_complains_is_quoted(tmp_path: Path) -> None:
    (result,) = tried(plugin_file(tmp_path, ("return nullptr;", 'return "not today";')))
    assert result.problem == "the kernel reports: not today"


def test_a_reference_of_another_shape_is_refused(tmp_path: Path) -> None:
    file = plugin_file(tmp_path, ("lambda x: x * x", "lambda x: x[:, :1]"))
    with pytest.raises(BuildError, match=r"its reference gives \[\(13, 1\)\], its shape rule"):
        tried(file)


def test_a_tactic_that_raises_is_named(tmp_path: Path) -> None:
    results = tried(plugin_file(tmp_path, ("    launch = ", "    raise KeyError('oops')\n    launch = ")))
    assert {result.problem for result in results} == {"its tactic failed: KeyError: 'oops'"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1", r"must define PLUGIN = .*; found nothing of that name"),
        ("PLUGIN = 3", r"found a int"),
        ("import nothing_like_this", r"(?s)cannot be loaded:.*line 1.*No module named"),
        ("raise SystemExit(0)", r"(?s)cannot be loaded:.*SystemExit"),
        ("def broken(:", r"(?s)cannot be loaded:.*SyntaxError"),
        (
            "from castiron.plugins.sdk import Plugin\nPLUGIN = Plugin('empty')",
            r"has no tactic, so it can change nothing",
        ),
    ],
)
def test_a_file_that_is_no_plugin_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(BuildError, match=expected):
        load_plugin(file)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(BuildError, match="there is no plugin file"):
        load_plugin("nowhere.py")


@pytest.mark.slow
def test_the_fused_activation_example_passes_on_gpu_and_host() -> None:
    file = EXAMPLES / "silu_mul.py"
    results = list(try_plugin(load_plugin(file), file, ["host", "sm_90"]))
    assert [result.problem for result in results] == [""] * len(results)
    assert {result.variant for result in results} >= {"f32", "bf16 column views", "f32 to bf16"}


@pytest.mark.slow
def test_the_attention_example_passes() -> None:
    file = EXAMPLES / "streaming_attention.py"
    results = list(try_plugin(load_plugin(file), file, ["sm_80"]))
    assert [result.problem for result in results] == [""] * len(results)


def test_a_cuda_kernel_that_leaves_its_operands_is_told_thread_and_place(tmp_path: Path) -> None:
    file = tmp_path / "silu_mul.py"
    text = (EXAMPLES / "silu_mul.py").read_text()
    assert text.count("up += (long long)blockIdx.x * up_stride") == 1
    wrong = "up += (gridDim.x + 0ll + blockIdx.x) * up_stride"
    file.write_text(text.replace("up += (long long)blockIdx.x * up_stride", wrong))
    problem = next(try_plugin(load_plugin(file), file, ["sm_90"])).problem
    # The last of 13 blocks runs first, and reads a row of 96 floats that is 12 behind the end.
    assert "4608 behind the end of x1, by thread (0, 0, 0) of block (12, 0, 0)" in problem


def test_cuda_source_that_does_not_compile_gets_nvrtcs_log(tmp_path: Path) -> None:
    file = tmp_path / "silu_mul.py"
    text = (EXAMPLES / "silu_mul.py").read_text()
    file.write_text(text.replace("float g = load(gate + i);", "float g = load(gate + i) + nonsense;"))
    results = list(try_plugin(load_plugin(file), file, ["sm_90"]))
    assert all('identifier "nonsense" is undefined' in result.problem for result in results)


def test_the_command_exits_with_1_when_anything_fails(tmp_path: Path) -> None:
    good = CliRunner().invoke(main, ["plugin", "test", str(plugin_file(tmp_path)), "--target", "host"])
    assert (good.exit_code, "passed" in good.output) == (0, True)
    bad = plugin_file(tmp_path, ("v * v;", "v;"))
    result = CliRunner().invoke(main, ["plugin", "test", str(bad), "--target", "host", "--json"])
    assert result.exit_code == 1
    assert '"passed": false' in result.stdout


def test_an_unknown_target_of_the_command_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["plugin", "test", str(plugin_file(tmp_path)), "--target", "sm_9"])
    assert result.exit_code == 1
    assert "did you mean sm_90" in result.stderr


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import sys

    sys.path.append(str(Path(__file__).parents[1] / "graph"))
    from zoo import make_checkpoint

    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    return folder


def test_a_build_with_a_plugin_agrees_with_the_source_model_and_needs_trust_to_run(
    llama: Path, tmp_path: Path
) -> None:
    plain, engine = tmp_path / "plain", tmp_path / "engine"
    options: dict[str, Any] = {"dtype": "float32", "max_seq_len": 64, "max_batch_size": 2}
    build(llama, plain, BuildOptions(**options))
    report = build(llama, engine, BuildOptions(**options, plugins=(EXAMPLES / "silu_mul.py",)))
    assert report.verification is not None
    assert report.verification.passed
    assert any("demo.SiluMul" in decision["what"] for decision in report.decisions)
    with pytest.raises(EngineError, match=r"machine code of plugins.*--trust-plugins"):
        ModelRunner.from_dir(engine)
    with ModelRunner.from_dir(plain) as one, ModelRunner.from_dir(engine, trust_plugins=True) as two:
        prompt = np.arange(3, 20)
        expected, found = (
            runner.generate(input_ids=[prompt], max_new_tokens=8)[0].outputs[0].token_ids
            for runner in (one, two)
        )
    assert found == expected
