"""The command line: ``castiron COMMAND``. A command's module is imported when it is used, so that ``castiron
run`` never pays for what ``castiron build`` needs.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

import castiron
from castiron.errors import CastironError
from castiron.interrupts import EXIT_CODE, raised

#: {command: (module below castiron.commands, one line for --help)}
COMMANDS: Mapping[str, tuple[str, str]] = {
    "build": ("build", "Cast a Hugging Face checkpoint into an engine."),
    "capture": ("capture", "Write the graph captured from a checkpoint as ONNX."),
    "inspect": ("inspect", "Show what an engine holds."),
    "verify": ("verify", "Compare an engine on this machine with its golden outputs."),
    "evaluate": ("evaluate", "Measure an engine's perplexity and what its quantization cost."),
    "run": ("run", "Generate text with an engine."),
    "serve-engine": ("serve_engine", "Serve an engine over an OpenAI-compatible HTTP API."),
    "plugin": ("plugin", "Work on plugins: custom ops, patterns and kernels."),
    "bench": ("bench", "Measure an engine's latency or throughput, or a server."),
}
#: {extra: the modules that only `pip install castiron[extra]` brings}
_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "build": (
        *("torch", "transformers", "onnx", "onnx_ir", "onnx_graphsurgeon", "safetensors", "gguf"),
        *("accelerate", "modelopt", "onnxscript", "triton"),
    ),
    "bench": ("aiohttp", "matplotlib"),
    "ray": ("ray",),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and summaries without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the pipeline."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; underscores in its name count as dashes."""
        name = cmd_name.replace("_", "-")
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f"castiron.commands.{COMMANDS[name][0]}").command
        command.name = name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the words name; a word that is none is told with the one that is like it."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            for known in get_close_matches(args[0], COMMANDS, 1, 0.5):
                raise click.UsageError(f"{error.message} Did you mean {known}?", ctx) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, importing none."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what a user can cause ends in a red line and exit code 1, not in a traceback."""
        try:
            with raised():
                return super().invoke(ctx)
        except CastironError as error:
            fail(str(error))
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            extra = next((name for name, modules in _EXTRAS.items() if package in modules), None)
            if extra is None:
                raise
            fail(f"this needs {package}, which is not installed. Run: pip install 'castiron[{extra}]'")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            where = f" ({error.filename})" if error.filename else ""
            fail(f"the output could not be written{where}: {error.strerror}; free some space")
        except KeyboardInterrupt:
            click.secho("interrupted", fg="yellow", err=True)
            sys.exit(EXIT_CODE)


def fail(message: str) -> None:
    """Print an error to stderr and exit with code 1."""
    click.echo(click.style("error: ", fg="red", bold=True) + click.style(message, fg="red"), err=True)
    sys.exit(1)


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "max_content_width": 110,
        # --max_batch_size is --max-batch-size, for every option of every command.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)
@click.version_option(castiron.__version__, "-V", "--version", prog_name="castiron")
def main() -> None:
    """Cast Hugging Face language models into engines, and run them without torch."""
