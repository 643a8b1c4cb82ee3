from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

import castiron
from castiron.cli import COMMANDS, main
from castiron.commands.common import table
from castiron.errors import RequestError


def with_command(monkeypatch: pytest.MonkeyPatch, command: click.Command) -> None:
    module = ModuleType("castiron.commands.inspect")
    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "castiron.commands.inspect", module)


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from castiron.cli import main\n"
        "print(CliRunner().invoke(main, ['--help']).output)\n"
        "heavy = ('torch', 'rich', 'numpy')\n"
        "print([m for m in sys.modules if m.startswith('castiron.commands') or m in heavy])"
    )
    output = python(code)
    for name in COMMANDS:
        assert name in output
    assert output.strip().endswith("[]")


@pytest.mark.parametrize("name", ["inspect", "verify", "build", "capture"])
def test_help_of_a_command_imports_neither_torch_nor_onnx_and_shows_defaults(name: str) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from castiron.cli import main\n"
        f"print(CliRunner().invoke(main, ['{name}', '--help']).output)\n"
        "print([m for m in ('torch', 'transformers', 'onnx') if m in sys.modules])"
    )
    output = python(code)
    assert output.strip().endswith("[]")
    assert "--json" in output
    if name == "build":
        assert "[default: 64;" in output


def test_the_version_is_the_packages() -> None:
    assert (
        CliRunner().invoke(main, ["--version"]).output.strip() == f"castiron, version {castiron.__version__}"
    )


def test_underscores_work_in_options_choices_and_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @click.option("--max-batch-size", type=int, default=3)
    @click.option("--kind", type=click.Choice(["one_two"]), default="one_two")
    def command(max_batch_size: int, kind: str) -> None:
        click.echo(f"{max_batch_size} {kind}")

    with_command(monkeypatch, command)
    for spelling in ("--max-batch-size", "--max_batch_size", "--max_batch-size"):
        for kind in ("one_two", "one-two"):
            result = CliRunner().invoke(main, ["inspect", spelling, "5", "--kind", kind])
            assert result.output == "5 one_two\n"
    assert "5" in CliRunner().invoke(main, ["inspect", "--max_batch_size=5"]).output
    monkeypatch.setitem(
        sys.modules, "castiron.commands.serve_engine", sys.modules["castiron.commands.inspect"]
    )
    assert CliRunner().invoke(main, ["serve_engine"]).exit_code == 0


def test_an_error_is_one_line_on_stderr_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        raise RequestError("found 3, expected 4. Give 4.")

    with_command(monkeypatch, command)
    result = CliRunner().invoke(main, ["inspect"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: found 3, expected 4. Give 4.\n"


@pytest.mark.parametrize(
    ("word", "like"),
    [("buildd", " Did you mean build?"), ("serve", " Did you mean serve-engine?"), ("x", "")],
)
def test_a_command_that_is_none_is_told_with_the_one_that_is_like_it(word: str, like: str) -> None:
    result = CliRunner().invoke(main, [word])
    assert result.exit_code == 2
    assert f"No such command '{word}'.{like}\n" in result.stderr


def test_a_title_may_be_wider_than_its_table() -> None:
    shown = io.StringIO()
    made = table("a long title over few columns", "a", "b")
    made.add_row("1", "2")
    console = Console(file=shown, width=60)
    for _ in range(2):
        console.print(made)
    lines = shown.getvalue().splitlines()
    assert [line.strip() for line in lines].count("a long title over few columns") == 2


def test_a_missing_build_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch.export")

    with_command(monkeypatch, command)
    result = CliRunner().invoke(main, ["inspect"])
    assert result.exit_code == 1
    assert "pip install 'castiron[build]'" in result.stderr


def test_a_bug_is_not_disguised(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        raise ModuleNotFoundError(
            "No module named 'castiron.commands.nothing'", name="castiron.commands.nothing"
        )

    with_command(monkeypatch, command)
    assert isinstance(CliRunner().invoke(main, ["inspect"]).exception, ModuleNotFoundError)


def test_output_that_finds_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with_command(monkeypatch, command)
    result = CliRunner().invoke(main, ["inspect"])
    assert result.exit_code == 1
    assert (
        result.stderr == "error: the output could not be written: No space left on device; free some space\n"
    )


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        raise KeyboardInterrupt

    with_command(monkeypatch, command)
    assert CliRunner().invoke(main, ["inspect"]).exit_code == 130


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["inspect"], ["inspect", "x", "--nothing"], ["build", "x"]]
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, arguments).exit_code == 2


def test_the_module_runs(tiny_engine: Path) -> None:
    command = [sys.executable, "-m", "castiron", "inspect", str(tiny_engine)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "TinyForCausalLM" in done.stdout
    command[-1] = str(tiny_engine / "nothing")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
