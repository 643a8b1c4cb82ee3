"""``castiron verify``: is the engine whole, and does it answer as its source model did?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from .common import console, engine_argument, json_option, print_json, table
from .runtime_options import device_option, trust_plugins_option

if TYPE_CHECKING:
    from rich.console import Console

    from castiron.runtime.verify_report import VerifyReport


@click.command()
@engine_argument
@json_option
@device_option
@trust_plugins_option
@click.option(
    "--num-threads", type=click.IntRange(min=1), show_default="all cores", help="Threads of the engine."
)
def command(engine: str, as_json: bool, device: str, trust_plugins: bool, num_threads: int | None) -> None:
    """Check every file of ENGINE and compare its answers with the golden outputs of its source model.

    Exits with 1 when a file is damaged or an answer is off.
    """
    from castiron.engines import open_engine
    from castiron.runtime.options import RuntimeOptions
    from castiron.runtime.verify import verify

    opened = open_engine(engine)
    out = console(stderr=True)
    with out.status("Comparing hashes"):
        opened.check_hashes()
    with out.status("Loading the engine") as status:
        report = verify(
            opened,
            options=RuntimeOptions(device=device, trust_plugins=trust_plugins, num_threads=num_threads),
            progress=lambda done, total: status.update(f"Comparing prompts {done}/{total}"),
        )
    if as_json:
        print_json({"engine": str(opened.path), "hashes": "match", **report.as_dict()})
    else:
        show_report(console(), report)
    if not report.passed:
        sys.exit(1)


def show_report(out: Console, report: VerifyReport) -> None:
    """Print a comparison as a table and a verdict."""
    from rich.markup import escape

    numbers = ("prompt", "rows", "max error", "mean KL", "top-1")
    rows = table("Golden outputs", "phase", "sequence", *numbers, "", right=numbers)
    for prompt in report.prompts:
        rows.add_row(
            prompt.phase,
            str(prompt.sequence),
            str(prompt.prompt_tokens),
            str(prompt.rows),
            f"{prompt.max_abs_error:.2e}",
            f"{prompt.mean_kl:.2e}",
            f"{prompt.top1_agreement:.1%}",
            f"[red]{escape(prompt.problem)}[/]" if prompt.problem else "[green]ok[/]",
        )
    out.print(rows)
    if report.device is not None:
        out.print(f"ran on {escape(report.device)}")
    out.print(
        f"prefill: max error {report.max_abs_error:.3g}, mean KL {report.mean_kl:.3g}, top-1 agreement "
        f"{report.top1_agreement:.1%} over {report.rows} rows; decode: max error "
        f"{report.decode_max_abs_error:.3g} over {report.decode_rows} tokens; {report.seconds:.1f} s"
    )
    if report.passed:
        out.print(
            "[bold green]verified[/]: every hash matches and the engine answers as its source model does"
        )
    for problem in report.problems:
        out.print(f"[bold red]failed[/]: {escape(problem)}")
