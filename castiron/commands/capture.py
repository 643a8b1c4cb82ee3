"""``castiron capture``: the graph of a checkpoint as an ONNX file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from castiron.errors import BuildError

from .common import console, human_bytes, json_option, print_json

if TYPE_CHECKING:
    import onnx


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="graph.onnx",
    help="The file to write.",
)
@click.option(
    "--max-seq-len", type=click.IntRange(min=1), show_default="the model's", help="Longest request."
)
@json_option
def command(model: str, output: Path, max_seq_len: int | None, as_json: bool) -> None:
    """Write the graph captured from MODEL, before any pass, as ONNX.

    Weights are not copied: the file refers to MODEL's own, so keep both where they are. Open it in Netron
    (https://netron.app, or pip install netron).
    """
    screen = console(stderr=True)
    with screen.status("Importing torch and transformers") as status:
        from castiron.graph import capture
        from castiron.graph.checkpoint import Checkpoint

        with Checkpoint.open(model) as checkpoint:
            captured = capture(
                checkpoint, max_seq_len=max_seq_len, progress=lambda text: status.update(text.capitalize())
            )
    graph = captured.model
    refer_relative_to(graph, output.absolute().parent)
    size = _write(graph, output)
    ops = sorted({f"{node.domain or 'onnx'}.{node.op_type}" for node in graph.graph.node})
    if as_json:
        print_json(
            {
                "output": str(output),
                "nodes": len(graph.graph.node),
                "initializers": len(graph.graph.initializer),
                "ops": ops,
                "layers": len(captured.layers),
                "replaced": captured.report.replaced,
                "notes": captured.report.notes,
                "seconds": captured.report.seconds,
            }
        )
        return
    out = console()
    for text in captured.report.notes:
        out.print(f"[yellow]note[/] {text}", markup=True)
    out.print(
        f"[bold green]Captured[/] {output}: {len(graph.graph.node)} nodes, {len(captured.layers)} attention "
        f"layers, {len(graph.graph.initializer)} weights by reference, {human_bytes(size)}, "
        f"{captured.report.seconds:.1f} s"
    )
    out.print(
        "Open it in Netron: https://netron.app in a browser, or pip install netron && netron " + str(output)
    )


def refer_relative_to(model: onnx.ModelProto, folder: Path) -> None:
    """Rewrite absolute locations of external data so that they hold from ``folder``.

    Files below ``folder`` get the plain relative path that ONNX asks for; ONNX tools may refuse to follow one
    that climbs (``../``), so elsewhere it only helps those that do, Netron among them.
    """
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location" and os.path.isabs(entry.value):
                entry.value = os.path.relpath(os.path.realpath(entry.value), os.path.realpath(folder))


def _write(model: onnx.ModelProto, output: Path) -> int:
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        data = model.SerializeToString()
        partial.write_bytes(data)
        os.replace(partial, output)
    except OSError as error:
        raise BuildError(
            f"{output} cannot be written ({error.strerror}). Choose another --output."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return len(data)
