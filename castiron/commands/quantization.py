"""Options of quantization for ``castiron build``, and how its results are shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from .common import human_change, human_count, printable, table

if TYPE_CHECKING:
    from rich.console import Console

    from castiron.calibration import QuantizationOptions

_AT_LEAST_ONE: Final = click.IntRange(min=1)
_RECIPES: Final = (
    "fp8",
    "fp8-block",
    "int8-sq",
    "int8-wo",
    "int4-awq",
    "int4-wo",
    "w4a8-awq",
    "nvfp4",
    "mxfp4",
)
#: Names of click parameters, by field of QuantizationOptions.
_FIELDS: Final = {
    "quantize": "recipe",
    "kv_cache_dtype": "kv_cache",
    "calib_data": "calib_data",
    "calib_size": "calib_size",
    "calib_seq_len": "calib_seq_len",
    "exclude": "exclude",
    "auto_quantize": "auto_bits",
    "quantize_lm_head": "quantize_head",
    "eval_data": "eval_data",
    "eval_tokens": "eval_tokens",
    "max_kl": "max_kl",
}

_OPTIONS: Final = (
    click.option(
        "--quantize",
        type=click.Choice(_RECIPES),
        show_default="nothing is quantized",
        help="Recipe for weights and activations (docs/quantization.md).",
    ),
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(["auto", "fp8", "int8"]),
        default="auto",
        help="Format of the KV cache; auto: that of --dtype, or a quantized checkpoint's own.",
    ),
    click.option(
        "--calib-data",
        type=click.Path(path_type=Path, exists=True),
        show_default="a text that ships with castiron",
        help="Text to calibrate on: a UTF-8 file, or a folder of .txt, .md and .jsonl files.",
    ),
    click.option("--calib-size", type=_AT_LEAST_ONE, default=16, help="Sequences to calibrate on."),
    click.option("--calib-seq-len", type=click.IntRange(min=2), default=512, help="Tokens of each."),
    click.option(
        "--exclude",
        metavar="PATTERN",
        multiple=True,
        help="Modules that stay as they are, such as 'model.layers.0.*' or '*.down_proj'; may be repeated.",
    ),
    click.option(
        "--auto-quantize",
        type=float,
        metavar="BITS",
        help="Mixed precision: hold the most sensitive layers in 8 bits, as many as BITS a weight allow.",
    ),
    click.option(
        "--quantize-lm-head/--no-quantize-lm-head",
        default=True,
        help="Hold the output projection as int8, whatever the recipe.",
    ),
    click.option(
        "--eval-data",
        type=click.Path(path_type=Path, exists=True),
        show_default="a text that ships with castiron",
        help="Held-out text of the accuracy report.",
    ),
    click.option(
        "--eval-tokens",
        type=click.IntRange(min=0),
        default=2048,
        help="Tokens of the accuracy report; 0: none.",
    ),
    click.option(
        "--max-kl", type=float, help="Fail when the mean KL to the unquantized model is larger, nats."
    ),
)


def quantization_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of quantization to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_options(given: dict[str, Any]) -> QuantizationOptions:
    """Remove the options of quantization from ``given`` and return them as one object."""
    from castiron.calibration import QuantizationOptions

    return QuantizationOptions(**{field: given.pop(name) for name, field in _FIELDS.items()})


def show_quantization(out: Console, found: dict[str, Any]) -> None:
    """Print the manifest's section as tables."""
    from rich.markup import escape

    columns = "format", "group", "inputs", "matrices", "weights", "bits a weight"
    shares = table("Quantization", *columns, right=("matrices", "weights", "bits a weight"))
    shares.title = (
        f"Quantization: {escape(found['recipe'])}, {found['bits_per_weight']:.2f} bits a weight, KV cache "
        f"{escape(found['kv_cache_dtype'])}"
    )
    for share in found["weights"]:
        shares.add_row(
            share["format"],
            str(share["group"] or ("row" if share["format"] in ("int8", "int4", "fp8", "fp4") else "")),
            escape(share["activations"]),
            f"{share['tensors']:,}",
            human_count(share["elements"]),
            f"{share['bits_per_weight']:.2f}",
        )
    out.print(shares)
    if found["excluded"]:
        out.print(f"[bold]Excluded[/] {escape(printable(', '.join(found['excluded'])))}")
    if found["calibration"]:
        text = found["calibration"]
        out.print(
            f"[bold]Calibrated[/] on {escape(text['name'])}: {text['windows']} sequences of "
            f"{text['window_tokens']} tokens"
        )
    show_accuracy(out, found)


def show_accuracy(out: Console, found: dict[str, Any]) -> None:
    """Print what quantization cost, and where."""
    from rich.markup import escape

    accuracy = found["accuracy"]
    if accuracy:
        source = accuracy["source_perplexity"]
        out.print(
            f"[bold]Accuracy[/] perplexity {accuracy['perplexity']:.4g}, "
            f"{human_change(accuracy['perplexity'] / source - 1)} "
            f"of the unquantized model's {source:.4g}; mean KL {accuracy['mean_kl']:.4f}, top-1 agreement "
            f"{accuracy['top1_agreement']:.1%}; {accuracy['predictions']:,} predictions of "
            f"{escape(accuracy['text']['name'])}, {escape(accuracy['measured'])}"
        )
    if found["worst_layers"]:
        worst = [f"{layer['name']} {layer['error']:.1%}" for layer in found["worst_layers"][:5]]
        out.print(f"[bold]Largest output errors[/] {escape(printable(', '.join(worst)))}")
    if found["suggestion"]:
        out.print(f"[bold]Suggestion[/] {escape(printable(found['suggestion']))}")
