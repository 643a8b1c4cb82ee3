"""``castiron evaluate``: perplexity of an engine, and how far it is from its unquantized source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import console, engine_argument, human_change, json_option, print_json
from .runtime_options import device_option, trust_plugins_option

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from castiron.calibration.texts import Windows
    from castiron.engines import Engine


@click.command()
@engine_argument
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="The unquantized checkpoint: with it also mean KL, top-1 agreement and the change of the "
    "perplexity. Needs castiron[build].",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True),
    show_default="a text that ships with castiron",
    help="Text: a UTF-8 file, or a folder of .txt, .md and .jsonl files.",
)
@click.option("--tokens", type=click.IntRange(min=2), default=20480, help="Tokens of it.")
@click.option(
    "--window",
    type=click.IntRange(min=2),
    show_default="512, or the engine's longest sequence",
    help="Tokens that are seen at once.",
)
@json_option
@device_option
@trust_plugins_option
@click.option(
    "--num-threads", type=click.IntRange(min=1), show_default="all cores", help="Threads of the engine."
)
def command(
    engine: str,
    model: Path | None,
    data: Path | None,
    tokens: int,
    window: int | None,
    as_json: bool,
    device: str,
    trust_plugins: bool,
    num_threads: int | None,
) -> None:
    """Measure how well ENGINE predicts a text.

    The text is cut into windows that do not overlap; every token of a window but the first is predicted from
    those before it (docs/quantization.md).
    """
    from castiron.engines import open_engine
    from castiron.runtime.evaluate import evaluate
    from castiron.runtime.options import RuntimeOptions

    opened = open_engine(engine)
    windows = _windows(opened, data, tokens, window)
    out = console(stderr=True)
    with out.status("Loading") as status:
        source = None if model is None else _source(model, opened)
        found, where = evaluate(
            opened,
            windows.ids,
            source,
            options=RuntimeOptions(device=device, trust_plugins=trust_plugins, num_threads=num_threads),
            progress=lambda done, total: status.update(f"Window {done} of {total}"),
        )
    result: dict[str, Any] = {
        "engine": str(opened.path),
        "device": where,
        "text": {"name": windows.data, "sha256": windows.sha256},
        "windows": int(windows.ids.shape[0]),
        "window_tokens": int(windows.ids.shape[1]),
        "predictions": found.predictions,
        "perplexity": found.perplexity,
    }
    if model is not None:
        result |= {
            "source_perplexity": found.source_perplexity,
            "increase": found.increase,
            "increase_standard_error": found.increase_error,
            "mean_kl": found.mean_kl,
            "top1_agreement": found.top1_agreement,
        }
    if as_json:
        print_json(result)
    else:
        _show(result)


def _windows(engine: Engine, data: Path | None, tokens: int, window: int | None) -> Windows:
    from castiron.calibration.texts import HELD_OUT_TEXT, default_text, read_text, token_windows

    if engine.tokenizer_dir is None:
        raise click.UsageError(f"{engine.path} has no tokenizer, so a text cannot become tokens.")
    length = window or min(512, engine.manifest.limits.max_seq_len)
    text = default_text(HELD_OUT_TEXT) if data is None else read_text(data)
    return token_windows(engine.tokenizer_dir, text, length, max(1, round(tokens / length)))


def _source(model: Path, engine: Engine) -> Any:
    import numpy as np

    from castiron.build.identity import parameter_count
    from castiron.errors import CheckpointError
    from castiron.graph.checkpoint import Checkpoint
    from castiron.graph.reference import SourceModel

    checkpoint = Checkpoint.open(model)
    built = engine.manifest.model
    if checkpoint.names.class_name != built.architecture or (
        parameter_count(checkpoint) != built.parameters and engine.manifest.quantization is None
    ):
        raise CheckpointError(
            f"{model} is a {checkpoint.names.class_name} of {parameter_count(checkpoint):,} parameters; the "
            f"engine was cast from a {built.architecture} of {built.parameters:,}. Give the model that the "
            "engine was built from, or its unquantized original"
        )
    vocab_size = int(checkpoint.hf_config.get_text_config().vocab_size)
    if vocab_size != engine.manifest.special_tokens.vocab_size:
        raise CheckpointError(
            f"{model} has a vocabulary of {vocab_size} tokens, the engine one of "
            f"{engine.manifest.special_tokens.vocab_size}: it was cast from another model"
        )
    source = SourceModel(checkpoint, max_seq_len=engine.manifest.limits.max_seq_len)

    def logits(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return source.logits(ids, np.arange(len(ids)))

    return logits


def _show(result: dict[str, Any]) -> None:
    from rich.markup import escape

    out = console()
    out.print(
        f"[bold]Perplexity[/] {result['perplexity']:.5g} over {result['predictions']:,} predictions of "
        f"{escape(result['text']['name'])}, windows of {result['window_tokens']}; {escape(result['device'])}"
    )
    if "source_perplexity" in result:
        out.print(
            f"[bold]Unquantized[/] {result['source_perplexity']:.5g}: {human_change(result['increase'])} "
            f"± {result['increase_standard_error']:.2%}, mean KL {result['mean_kl']:.5f}, top-1 agreement "
            f"{result['top1_agreement']:.2%}"
        )
