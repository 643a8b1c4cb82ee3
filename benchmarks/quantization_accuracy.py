"""What each recipe costs: engines built and compared with the unquantized model on held-out text.

    python benchmarks/quantization_accuracy.py MODEL --data TEXT --tokens 20480 \
        --recipes int4-awq,int8-sq,none:kv=fp8 --naive --work /tmp/quantization

The source model's logits are computed once and kept in --work as float16 (tokens x vocabulary). Each recipe
is built for host with the default calibration text, and the engine's own logits are compared. ``NAME:kv=fp8``
adds a quantized cache; ``none@FILE`` builds another checkpoint, a GGUF say, as it is. ``--naive`` also
measures the recipe's twin: the same formats by their plain definitions, rounded to the nearest, without
calibration beyond the ranges of activations.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from castiron.build import BuildOptions, build
from castiron.calibration import RECIPES, QuantizationOptions
from castiron.calibration.recipes import Recipe
from castiron.calibration.texts import Windows, read_text, token_windows
from castiron.engines import open_engine
from castiron.engines.accuracy import Comparison
from castiron.graph.checkpoint import Checkpoint
from castiron.graph.reference import SourceModel
from castiron.runtime.options import RuntimeOptions
from castiron.runtime.probe import Probe
from castiron.runtime.verify import CoreRunner


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--naive", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--threads", type=int, help="of the engine; default: all cores")
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    windows = token_windows(given.model, read_text(given.data), given.window, given.tokens // given.window)
    source = _source_logits(given.model, windows, given.work)
    for name in given.recipes.split(","):
        for naive in (False, True) if given.naive else (False,):
            _report(name, naive, _measure(name, naive, windows, source, given))


def _source_logits(model: Path, windows: Windows, work: Path) -> np.ndarray[Any, Any]:
    count, length = windows.ids.shape
    file = work / f"source-{windows.sha256[:12]}-{count}x{length}.npy"
    if not file.is_file():
        source = SourceModel(Checkpoint.open(model))
        everything = np.arange(length)
        vocabulary = int(source.model.config.vocab_size)
        kept = np.lib.format.open_memmap(
            file.with_suffix(".tmp"), "w+", np.float16, (count, length, vocabulary)
        )
        for index, ids in enumerate(windows.ids):
            kept[index] = source.logits(ids, everything)
        kept.flush()
        file.with_suffix(".tmp").rename(file)
    return np.load(file, mmap_mode="r")


def _measure(
    name: str, naive: bool, windows: Windows, source: np.ndarray[Any, Any], given: argparse.Namespace
) -> dict[str, Any]:
    name, _, model = name.partition("@")
    recipe, _, extra = name.partition(":")
    options = QuantizationOptions(
        recipe=None if recipe == "none" else recipe,
        kv_cache="fp8" if "kv=fp8" in extra else "int8" if "kv=int8" in extra else "auto",  # type: ignore[arg-type]
        eval_tokens=0,
    )
    folder = given.work / "engine"
    shutil.rmtree(folder, ignore_errors=True)
    started, cpu = time.perf_counter(), time.process_time()
    saved = dict(RECIPES)
    # The key of a calibration knows recipes by their names: the twin's results lie elsewhere.
    os.environ["XDG_CACHE_HOME"] = str(given.work / ("plain" if naive else "calibrated"))
    try:
        if naive and recipe != "none":
            RECIPES[recipe] = _plain(RECIPES[recipe])
        report = build(
            model or given.model,
            folder,
            BuildOptions(
                dtype=given.dtype,
                quantization=options,
                max_seq_len=given.window,
                activations=given.activations,
                verify="never",
            ),
        )
    finally:
        RECIPES.update(saved)
    built = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    comparison, engine = Comparison(), open_engine(folder)
    with CoreRunner(engine, given.window, RuntimeOptions(num_threads=given.threads)) as runner:
        probe = Probe(runner.core, runner.make_params)
        for ids, logits in zip(windows.ids, source, strict=True):
            comparison.add(ids, probe.context_logits(ids.astype(np.int32)), logits.astype(np.float32))
    about = engine.manifest.quantization
    return {
        **built,
        "phases": report.phases,
        "peak_rss": report.peak_rss_bytes,
        "bits": 16.0 if about is None else about.bits_per_weight,
        "perplexity": comparison.perplexity,
        "source_perplexity": comparison.source_perplexity,
        "increase": comparison.increase,
        "error": comparison.increase_error,
        "kl": comparison.mean_kl,
        "top1": comparison.top1_agreement,
        "predictions": comparison.predictions,
    }


def _plain(recipe: Recipe) -> Recipe:
    return replace(recipe, scheme=replace(recipe.scheme, rounding="nearest", prescale=""))


def _report(name: str, naive: bool, found: dict[str, Any]) -> None:
    label = f"{name}{' (plain)' if naive else ''}"
    print(
        f"{label:24s} {found['bits']:5.2f} bits  perplexity {found['perplexity']:8.4f} "
        f"{found['increase']:+8.3%} ± {found['error']:.3%}  KL {found['kl']:.5f}  top-1 {found['top1']:.2%}  "
        f"built in {found['seconds']:.0f} s ({found['cpu']:.0f} s of CPU), peak "
        f"{found['peak_rss'] / 2**20:,.0f} MiB",
        flush=True,
    )
    print(json.dumps({"recipe": name, "naive": naive, **found}), flush=True)


if __name__ == "__main__":
    main()
