"""``castiron inspect --kernels``: what the compiled kernels of an engine use and what they should reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .common import human_bytes, printable, table

if TYPE_CHECKING:
    from rich.console import Console

    from castiron.engines import Engine, Program

#: Tokens in the cache at the decode step of the estimate, where the engine allows as many.
_CONTEXT = 1024


def summarize_kernels(engine: Engine) -> dict[str, Any]:
    """Return {target: its kernels and the occasions that loads are estimated for}, CUDA targets only."""
    return {
        target: _summarize(engine.program(target))
        for target in engine.targets
        if target != "host" and engine.program(target).kernels
    }


def _summarize(program: Program) -> dict[str, Any]:
    from castiron.engines.kernel_load import Occasion, kernel_loads
    from castiron.plugins.targets import TARGETS

    limits, target = program.limits, TARGETS.get(program.target)
    context = min(_CONTEXT, limits.max_seq_len)
    prompt = min(limits.max_num_tokens, limits.max_seq_len)
    occasions = {
        "decode": Occasion(1, context, program.prefill_tile),
        "prefill": Occasion(prompt, prompt, program.prefill_tile),
    }
    loads = {name: kernel_loads(program, occasion) for name, occasion in occasions.items()}
    kernels = []
    for index, kernel in enumerate(program.kernels):
        row: dict[str, Any] = {
            "name": kernel.name,
            "source": kernel.source,
            "threads": kernel.threads,
            "shared_bytes": kernel.shared_bytes,
            "constants": kernel.constants,
            **kernel.resources,
        }
        for name, load in loads.items():
            one = load[index]
            row[name] = {"launches": one.launches, "bytes": one.bytes, "flops": one.flops}
            if target is not None and one.launches:
                seconds = max(one.bytes / target.bandwidth, one.flops / target.matrix_flops)
                row[name]["floor_us"] = round(1e6 * seconds / one.launches, 3)
        kernels.append(row)
    return {
        "occasions": {
            name: {"tokens": one.tokens, "context": one.context} for name, one in occasions.items()
        },
        "kernels": kernels,
    }


#: What the table needs for names of ordinary length.
_LEAST_COLUMNS = 148


def show_kernels(out: Console, summary: dict[str, Any]) -> None:
    """Print a table for each target."""
    from rich.markup import escape

    # Names cut into pieces help nobody: a narrow terminal wraps whole lines instead.
    out.width = max(out.width, _LEAST_COLUMNS)
    for target, found in summary.items():
        occasions = found["occasions"]
        shown = table(
            f"Kernels of {target}: launches and floor (µs a launch, by bandwidth or matrix peak) at a decode "
            f"of 1 row with {occasions['decode']['context']} tokens cached, and a prefill of "
            f"{occasions['prefill']['tokens']} tokens",
            *("kernel", "threads", "registers", "spills", "shared", "occupancy", "matrix", "16-byte loads"),
            *("decode", "floor", "prefill", "floor"),
            right=("threads", "registers", "spills", "shared", "occupancy", "16-byte loads", "floor"),
        )
        for kernel in found["kernels"]:
            shown.add_row(*(escape(printable(str(cell))) for cell in _cells(kernel)))
        out.print(shown)
        for kernel in found["kernels"]:
            if kernel.get("weakness"):
                words = printable(f"{kernel['name']}: {kernel['weakness']}")
                out.print(f"[yellow]weak[/] {escape(words)}")


def _cells(kernel: dict[str, Any]) -> list[Any]:
    loads, wide = kernel.get("global_loads", 0), kernel.get("wide_loads", 0)
    matrix = kernel.get("matrix") or "-"
    cells = [
        kernel["name"],
        kernel["threads"],
        kernel.get("registers", "?"),
        kernel.get("spills", "?"),
        human_bytes(kernel["shared_bytes"] + _number(kernel.get("static_shared_bytes"))),
        f"{_number(kernel.get('occupancy')):.0%}",
        matrix if matrix == "-" else f"{matrix} {kernel.get('matrix_instructions')}",
        f"{_number(wide) / _number(loads):.0%}" if _number(loads) else "-",
    ]
    for name in ("decode", "prefill"):
        load = kernel[name]
        cells += [f"×{load['launches']}", load.get("floor_us", "-")] if load["launches"] else ["", ""]
    return cells


def _number(value: Any) -> Any:
    """A number of ``Kernel.resources``, which no schema types; 0 for anything else."""
    return value if isinstance(value, int | float) else 0
