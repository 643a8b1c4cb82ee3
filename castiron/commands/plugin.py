"""``castiron plugin test``: a plugin's tactics against their references, wherever they can run here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import comma_lists, console, json_option, print_json, printable, table

if TYPE_CHECKING:
    from rich.console import Console

    from castiron.build.trials.trial import TrialResult

_DEFAULT_TARGETS = ("host", "sm_80", "sm_90", "sm_100", "sm_120", "compute_80")


@click.group(short_help="Work on plugins: custom ops, patterns and kernels.")
def command() -> None:
    """Work on plugins: custom ops, graph patterns and kernels of your own (docs/plugins.md)."""


@command.command("test", short_help="Check a plugin's kernels against their references.")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "--target",
    "targets",
    multiple=True,
    default=_DEFAULT_TARGETS,
    show_default=", ".join(_DEFAULT_TARGETS),
    callback=comma_lists,
    help="Targets to compile for and to try; several by commas or by repeating.",
)
@json_option
def test(file: Path, targets: tuple[str, ...], as_json: bool) -> None:
    """Try the plugin FILE: each example of each op, with each of its tactics.

    Every kernel is compiled for every target. Kernels for the CPU run as they are; CUDA C++ runs compiled for
    the CPU, Triton in its interpreter. Operands lie between forbidden pages, so that a kernel that leaves
    them fails. Exits with 1 when anything fails.
    """
    from castiron.build.options import check_target
    from castiron.build.trials.trial import try_plugin
    from castiron.plugins.sdk import load_plugin

    for target in targets:
        check_target(target)
    plugin = load_plugin(file)
    results: list[TrialResult] = []
    out = console(stderr=True)
    with out.status("Compiling") as status:
        for result in try_plugin(plugin, file.absolute(), targets):
            results.append(result)
            status.update(f"{len(results)} runs, now {printable(result.tactic)} on {result.target}")
    if as_json:
        print_json({"plugin": plugin.name, "results": [_as_dict(result) for result in results]})
    else:
        _show(console(), plugin.name, results)
    if not results or not all(result.passed for result in results):
        sys.exit(1)


def _as_dict(result: TrialResult) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(result), "passed": result.passed}


def _show(out: Console, name: str, results: list[TrialResult]) -> None:
    from rich.markup import escape

    columns = ("tactic", "target", "operands", "max error", "allowed", "")
    rows = table(f"Plugin {printable(name)}", *columns, right=("max error", "allowed"))
    for result in results:
        rows.add_row(
            escape(result.tactic),
            result.target,
            result.variant,
            "" if result.error is None else f"{result.error:.2e}",
            "" if result.tolerance is None else f"{result.tolerance:.2e}",
            "[green]ok[/]" if result.passed else "[red]failed[/]",
        )
    out.print(rows)
    failed: dict[str, list[str]] = {}
    for result in results:
        if not result.passed:
            where = f"{result.tactic} on {result.target} ({result.variant})"
            failed.setdefault(result.problem, []).append(where)
    for problem, places in failed.items():
        out.print(f"[bold red]failed[/] {escape(', '.join(places))}:\n{escape(problem)}")
    if not results:
        out.print("[bold red]failed[/]: no example applies to these targets")
    elif not failed:
        out.print(f"[bold green]passed[/]: {len(results)} runs")
