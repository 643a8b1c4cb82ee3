"""``castiron inspect``: everything an engine says about itself."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from .common import (
    console,
    engine_argument,
    human_bytes,
    human_count,
    json_option,
    print_json,
    printable,
    table,
)
from .inspect_kernels import show_kernels, summarize_kernels
from .quantization import show_quantization

if TYPE_CHECKING:
    from rich.console import Console

    from castiron.engines import Engine, Program


@click.command()
@engine_argument
@json_option
@click.option("--steps", is_flag=True, help="List every step of every program.")
@click.option(
    "--kernels",
    is_flag=True,
    help="Show the compiled kernels: registers, spills, occupancy, instruction mix, roofline floors.",
)
@click.option("--check", is_flag=True, help="Also compare every byte of every file with its recorded hash.")
def command(engine: str, as_json: bool, steps: bool, kernels: bool, check: bool) -> None:
    """Show what the engine in the folder ENGINE holds."""
    from castiron.engines import open_engine
    from castiron.engines.precision import precision

    opened = open_engine(engine)
    if check:
        opened.check_hashes()
    if kernels:
        found = summarize_kernels(opened)
        if not found:
            raise click.UsageError(
                f"{engine} was built for {', '.join(opened.targets)}: the runtime brings those kernels; "
                "engines for sm_... and compute_... targets hold their own."
            )
        if as_json:
            print_json(found)
        else:
            show_kernels(console(), found)
        return
    summary = summarize(opened, steps=steps)
    summary["hashes_checked"] = check
    if as_json:
        print_json(summary)
    else:
        manifest, programs = opened.manifest, opened.programs.values()
        _show(console(), summary, precision(manifest.model.dtype, manifest.recipe, programs))


def summarize(engine: Engine, *, steps: bool) -> dict[str, Any]:
    """Return the JSON object of ``inspect --json``."""
    from castiron.engines.precision import stored_dtypes

    manifest = engine.manifest
    report = engine.build_report()
    return {
        "engine": str(engine.path),
        "format_version": manifest.format_version,
        "castiron_version": manifest.castiron_version,
        "model": manifest.model.model_dump(),
        "stored_dtypes": stored_dtypes(engine.programs.values()) or [manifest.model.dtype],
        "targets": engine.targets,
        "limits": manifest.limits.model_dump(),
        "quantization": None if manifest.quantization is None else manifest.quantization.model_dump(),
        "special_tokens": manifest.special_tokens.model_dump(),
        "tokenizer": engine.tokenizer_dir is not None,
        "memory_plan": [row.model_dump() for row in manifest.memory_plan],
        "weights": _weights_by_dtype(engine),
        "programs": {target: _summarize_program(engine.program(target), steps) for target in engine.targets},
        "passes": _rows(report, "passes"),
        "decisions": _rows(report, "decisions"),
        "golden": manifest.golden.model_dump() if manifest.golden else None,
        "files": {name: record.size for name, record in manifest.files.items()},
    }


def _rows(report: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return a list of objects of the build report, which no schema checks."""
    rows = report.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _weights_by_dtype(engine: Engine) -> list[dict[str, Any]]:
    layouts = {w.name: (w.layout, math.prod(w.shape)) for p in engine.programs.values() for w in p.weights}
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for name, entry in engine.entries.items():
        layout, elements = layouts.get(name, ("unused", 0))
        group = groups.setdefault(
            (entry.dtype, layout),
            {"dtype": entry.dtype, "layout": layout, "tensors": 0, "elements": 0, "bytes": 0},
        )
        group["tensors"] += 1
        group["elements"] += elements
        group["bytes"] += entry.nbytes
    return sorted(groups.values(), key=lambda group: -group["bytes"])


def _summarize_program(program: Program, steps: bool) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "steps": len(program.steps),
        "values": len(program.values),
        "arena_bytes": program.arena_bytes,
        "kv_layers": len(program.kv_layers),
        "kernels": dict(Counter(step.kernel for step in program.steps).most_common()),
    }
    if steps:
        summary["step_list"] = [step.model_dump() for step in program.steps]
    return summary


def _show(out: Console, summary: dict[str, Any], precision: str) -> None:
    from rich.markup import escape

    model, limits, tokens = summary["model"], summary["limits"], summary["special_tokens"]
    facts = table(f"Engine {escape(summary['engine'])}", "", "")
    facts.show_header = False
    for key, value in {
        "model": f"{model['name']} · {model['architecture']} · {human_count(model['parameters'])} parameters",
        "source": f"{model['source']} ({model['source_dtype']})",
        "precision": precision,
        "targets": ", ".join(summary["targets"]),
        "limits": f"{limits['max_batch_size']} requests · {limits['max_seq_len']} tokens each · "
        f"{limits['max_num_tokens']} tokens and {limits['max_logit_rows']} logit rows a step",
        "vocabulary": f"{tokens['vocab_size']} ({tokens['vocab_size_used']} used) · end of text "
        f"{tokens['eos_token_ids'] or 'unknown'} · tokenizer {'yes' if summary['tokenizer'] else 'no'}",
        "format": f"{summary['format_version']}, written by castiron {summary['castiron_version']}",
        "hashes": "all match" if summary["hashes_checked"] else "weights not checked (give --check)",
    }.items():
        facts.add_row(f"[bold]{key}[/]", escape(str(value)))
    out.print(facts)
    if summary["quantization"]:
        show_quantization(out, summary["quantization"])
    _show_memory(out, summary)
    _show_programs(out, summary)
    _show_report(out, summary)
    _show_golden(out, summary["golden"])


def _show_memory(out: Console, summary: dict[str, Any]) -> None:
    from rich.markup import escape

    if summary["memory_plan"]:
        plan = table("Memory plan", "item", "size", "note", right=("size",))
        for row in summary["memory_plan"]:
            plan.add_row(escape(row["item"]), human_bytes(row["bytes"]), escape(row["note"]))
        out.print(plan)
    weights = table(
        "Weights", "dtype", "layout", "tensors", "elements", "size", right=("tensors", "elements", "size")
    )
    for group in summary["weights"]:
        numbers = f"{group['tensors']:,}", f"{group['elements']:,}", human_bytes(group["bytes"])
        weights.add_row(group["dtype"], group["layout"], *numbers)
    out.print(weights)


def _show_programs(out: Console, summary: dict[str, Any]) -> None:
    from rich.markup import escape

    for target, program in summary["programs"].items():
        title = f"Program for {target}: {program['steps']} steps, arena {human_bytes(program['arena_bytes'])}"
        kernels = table(
            f"{title}, {program['kv_layers']} cache layers", "kernel", "steps", "", right=("steps",)
        )
        most = max(program["kernels"].values(), default=1)
        for name, count in program["kernels"].items():
            kernels.add_row(escape(name), str(count), "█" * max(1, round(30 * count / most)))
        out.print(kernels)
        for index, step in enumerate(program.get("step_list", [])):
            attrs = " ".join(f"{key}={value}" for key, value in step["attrs"].items())
            operands = " ".join([*step["inputs"], *(f"<{name}>" for name in step["weights"])])
            results = ", ".join(step["outputs"]) or "(cache)"
            line = f"{index:4d}  {results} = {step['kernel']}({operands}) {attrs}"
            out.print(escape(printable(line)), soft_wrap=True)


def _show_report(out: Console, summary: dict[str, Any]) -> None:
    from rich.markup import escape

    if summary["passes"]:
        passes = table("Passes", "pass", "applied", right=("applied",))
        for item in summary["passes"]:
            passes.add_row(escape(printable(str(item.get("name")))), str(item.get("applied")))
        out.print(passes)
    show_decisions(out, summary["decisions"])


def show_decisions(out: Console, decisions: list[dict[str, Any]]) -> None:
    """Print what a build decided and why."""
    from rich.markup import escape

    if decisions:
        shown = table("Decisions", "what", "choice", "why")
        for item in decisions:
            shown.add_row(*(escape(printable(str(item.get(key, "")))) for key in ("what", "choice", "why")))
        out.print(shown)


def _show_golden(out: Console, golden: dict[str, Any] | None) -> None:
    if golden is None:
        out.print(
            "[yellow]No golden outputs[/]: built with --verify never; castiron verify cannot compare it."
        )
        return
    out.print(
        f"[bold]Golden outputs[/]: {golden['sequences']} sequences, "
        f"{golden['prefill_rows']} rows of prefill, {golden['decode_rows']} of decode"
    )
    found = golden["verification"]
    if found is not None:
        word = "[green]passed[/]" if found["passed"] else "[red]failed[/]"
        out.print(
            f"At build: {word}, max error {found['max_abs_error']:.3g}, mean KL {found['mean_kl']:.3g}, "
            f"top-1 agreement {found['top1_agreement']:.1%} over {found['rows']} rows"
        )
