"""``castiron build``: a checkpoint becomes an engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import comma_lists, console, human_bytes, human_count, json_option, print_json
from .inspect import show_decisions
from .quantization import quantization_options, show_accuracy, take_options

if TYPE_CHECKING:
    from rich.console import Console

    from castiron.build.report import BuildReport

_POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "-o", "--output-dir", type=click.Path(path_type=Path), help="Folder of the engine; required to build."
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    default=("auto",),
    callback=comma_lists,
    help="host, sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, or auto: host and this machine's GPU; several by "
    "commas or by repeating.",
)
@click.option(
    "--ptx/--no-ptx",
    default=True,
    help="Beside sm_... targets, also keep PTX that drivers compile for architectures to come.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32", "float16"]),
    default="bfloat16",
    help="Storage of matrices and of the KV cache; sums are always float32. float16 is for GPU targets, "
    "float32 for host.",
)
@click.option("--max-batch-size", type=_POSITIVE, default=64, help="Requests that run at once.")
@click.option(
    "--max-seq-len",
    type=_POSITIVE,
    show_default="the model's, at most 8192",
    help="Tokens of one request, prompt and answer together.",
)
@click.option(
    "--max-num-tokens",
    type=_POSITIVE,
    show_default="1024, or the batch size if larger",
    help="Tokens of one step over all requests: prefill chunks and decodes.",
)
@click.option(
    "--max-logit-rows",
    type=_POSITIVE,
    show_default="the batch size, at least 64",
    help="Rows of logits of one step.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing.")
@click.option(
    "--dump-graph",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the graph after every pass.",
)
@click.option(
    "--plugin",
    "plugins",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="A plugin file (docs/plugins.md): its ops, patterns and tactics take part; may be repeated.",
)
@quantization_options
@click.option(
    "--activations",
    type=click.Choice(["auto", "full"]),
    default="auto",
    help="auto: on host, products with weights of 8 or 4 bits may round their inputs to int8; full: never.",
)
@click.option(
    "--max-lora-rank",
    type=click.IntRange(1, 512),
    show_default="GPUs take no adapters",
    help="Let GPU targets take LoRA adapters of ranks up to this, a multiple of 16; host takes any.",
)
@click.option("--overwrite", is_flag=True, help="Replace an engine that is already there.")
@click.option(
    "--verify",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="Compare the engine with the source model; auto: unless the model is too large for it.",
)
@click.option("--num-threads", type=_POSITIVE, show_default="all cores", help="Threads of the comparison.")
@json_option
def command(model: str, output_dir: Path | None, as_json: bool, **options: Any) -> None:
    """Cast MODEL into an engine.

    MODEL is a local Hugging Face folder, a hub id where the hub is reachable, or a GGUF file. The engine is
    checked against MODEL at the end, and appears in its folder whole or not at all.
    """
    if output_dir is None and not options["dry_run"]:
        raise click.UsageError("Missing option '--output-dir': the folder for the engine.")
    from castiron.engines import check_output_dir

    if output_dir is not None and not options["dry_run"]:
        # Before torch is imported and the model captured: minutes of work must not end in a refusal.
        check_output_dir(output_dir.absolute(), options["overwrite"])
    from .build_progress import RichProgress

    screen = console(stderr=as_json)
    progress = RichProgress(screen)
    with progress:
        from castiron.build import BuildOptions, build

        quantization = take_options(options)
        made = BuildOptions(**options, quantization=quantization)
        report = build(model, output_dir or Path("engine"), made, progress=progress)
    if as_json:
        print_json(report.to_dict())
    else:
        show_report(screen, report)


def show_report(out: Console, report: BuildReport) -> None:
    """Print what a build decided, how long it took and what to do next."""
    from rich.markup import escape

    plan = report.plan
    applied: Counter[str] = Counter()
    for name, count in report.passes:
        applied[name] += count
    passes = [f"{name} ×{count}" for name, count in applied.items() if count]
    if passes:
        out.print(f"[bold]Passes[/] {escape(', '.join(passes))}")
    show_decisions(out, list(report.decisions))
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.phases.items())
    memory = f", peak memory {human_bytes(report.peak_rss_bytes)}" if report.peak_rss_bytes else ""
    out.print(f"[bold]Time[/] {report.seconds:.1f} s ({phases}){memory}")
    found = report.verification
    if found is not None:
        word = "[green]agrees[/]" if found.passed else "[red]disagrees[/]"
        out.print(
            f"[bold]Verified[/] {word} with the source model: max error {found.max_abs_error:.3g}, mean KL "
            f"{found.mean_kl:.3g}, top-1 agreement {found.top1_agreement:.1%} over {found.rows} rows"
        )
    if report.quantization is not None:
        show_accuracy(out, report.quantization.model_dump())
    if report.dry_run:
        out.print("Dry run: nothing was written.")
        return
    size = sum(file.stat().st_size for file in Path(report.output_dir).iterdir())
    out.print(
        f"[bold green]Built[/] {escape(report.output_dir)}: {escape(plan.architecture)}, "
        f"{human_count(plan.parameters)} parameters, {human_bytes(size)}"
    )
    out.print(f'Next: castiron run {escape(report.output_dir)} --prompt "…"', style="dim")
