"""An engine end to end on the GPU: decode steps, prompts, and a full batch with in-flight batching.

  time_engine.py ENGINE --peaks FILE [--decode 1,8,64,256] [--prefill 1000,8000] [--requests 256]

Decode times are medians between the starts of successive steps in the runtime's own records, so that they
hold the scheduler's time as well. Prompts are random ids; EOS is ignored; greedy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from castiron.engines import layout_bytes, open_engine
from castiron.engines.kv_cache import token_bytes
from castiron.engines.program import Program
from castiron.runtime import ModelRunner
from rows import Row

_PROMPT = 128
_NEW_TOKENS = 64


class Timer:
    """Runs random prompts and reads the runtime's records."""

    def __init__(self, runner: ModelRunner, program: Program, peaks: dict[str, float], name: str) -> None:
        self.runner, self.program, self.peaks, self.name = runner, program, peaks, name
        self.random = random.Random(0)
        self.weight_bytes = _weights_read(program)
        self.matrix_numbers = _matrix_numbers(program)
        self.kv_bytes = token_bytes(program.kv_layers)

    def generate(self, requests: int, prompt: int, new: int) -> float:
        """Wall seconds of that many requests at once."""
        vocab = self.program.vocab_size
        prompts = [[self.random.randrange(vocab) for _ in range(prompt)] for _ in range(requests)]
        start = time.perf_counter()
        results = self.runner.generate(
            input_ids=prompts, max_new_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False
        )
        seconds = time.perf_counter() - start
        for result in results:
            if result.error is not None:
                raise SystemExit(f"{self.name}: {result.error}")
        return seconds

    def steps(self, count: int) -> list[dict[str, Any]]:
        """Records of the last steps, oldest first."""
        core: Any = self.runner.session.core  # _core.Engine, whose stats take a number of records
        stats = core.stats(count)
        records: list[dict[str, Any]] = stats.get("recent_steps", [])
        return sorted(records, key=lambda record: int(record["step"]))

    def decode(self, batch: int) -> Row:
        """A step of ``batch`` sequences, against reading weights and cache once."""
        self.generate(batch, _PROMPT, _NEW_TOKENS)
        records = [r for r in self.steps(2 * _NEW_TOKENS) if _is_full(r, batch)]
        pairs = itertools.pairwise(records)
        times = [b["start_s"] - a["start_s"] for a, b in pairs if b["step"] == a["step"] + 1]
        if not times:
            return Row(self.section, f"decode, batch {batch}", note="no two successive full steps")
        seconds = statistics.median(times)
        context = _PROMPT + _NEW_TOKENS / 2
        floor = (self.weight_bytes + batch * context * self.kv_bytes) / self.peaks["bandwidth"]
        forward = statistics.median(r["forward_s"] for r in records)
        replayed = sum(r["graph"] > 0 for r in records)
        note = (
            f"{batch / seconds:,.0f} tokens/s; {1e3 * forward:.3f} ms on the device; "
            f"{replayed} of {len(records)} steps replayed"
        )
        return Row(
            self.section,
            f"decode, batch {batch}",
            value=1e3 * seconds,
            unit="ms/step",
            roof="bandwidth floor",
            share=floor / seconds,
            note=note,
        )

    def prefill(self, prompt: int) -> Row:
        """From a prompt to its first token, against the products at the measured matrix peak."""
        seconds = statistics.median(self.generate(1, prompt, 1) for _ in range(3))
        floor = 2.0 * prompt * self.matrix_numbers / self.peaks["matrix"]
        return Row(
            self.section,
            f"first token of a prompt of {prompt}",
            value=1e3 * seconds,
            unit="ms",
            roof="matrix peak",
            share=floor / seconds,
            note=f"{prompt / seconds:,.0f} tokens/s",
        )

    def throughput(self, requests: int, prompt: int, new: int) -> Row:
        """Many requests at once, prompts included."""
        seconds = self.generate(requests, prompt, new)
        return Row(
            self.section,
            f"{requests} requests, {prompt} in, {new} out",
            value=requests * new / seconds,
            unit="tokens/s",
            note=f"{seconds:.1f} s; {requests * (prompt + new) / seconds:,.0f} tokens/s in and out",
        )

    @property
    def section(self) -> str:
        return f"engine {self.name}, end to end"


def _is_full(record: dict[str, Any], batch: int) -> bool:
    return bool(record["decode_tokens"] == batch and record["prefill_tokens"] == 0)


def _weights_read(program: Program) -> int:
    """Bytes of all weights but tables that only give rows away."""
    tables = {w for step in program.steps if step.kernel == "embedding" for w in step.weights}
    read = {w for step in program.steps if step.kernel != "embedding" for w in step.weights}
    only_tables = tables - read
    return sum(layout_bytes(w) for w in program.weights if w.name not in only_tables)


def _matrix_numbers(program: Program) -> int:
    """Numbers in the matrices that every token of a prompt meets; the LM head sees the last one alone."""
    matrices = {
        name
        for step in program.steps
        if step.kernel in ("linear", "gated_linear") and "logits" not in step.outputs
        for name in step.weights
    }
    shapes = [weight.shape for weight in program.weights if weight.name in matrices]
    return sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--peaks", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--decode", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument("--prefill", type=numbers, default=[1000, 8000])
    parser.add_argument("--requests", type=int, default=256, help="of 1000 tokens in and 1000 out")
    options = parser.parse_args()
    peaks = json.loads(options.peaks.read_text())
    engine = open_engine(options.engine)
    start = time.perf_counter()
    with ModelRunner.from_dir(options.engine, device=options.device) as runner:
        loaded = time.perf_counter() - start
        choice = runner.device
        if choice is None:
            raise SystemExit("the runtime does not say which program it runs")
        timer = Timer(runner, engine.program(choice.target), peaks, options.engine.name)
        graphs = runner.stats().get("cuda", {})
        note = f"{graphs.get('graphs')} graphs in {graphs.get('graph_seconds', 0):.1f} s"
        Row(timer.section, "load, start to ready", value=loaded, unit="s", note=note).emit()
        timer.generate(1, _PROMPT, 2)
        for batch in options.decode:
            timer.decode(batch).emit()
        for prompt in options.prefill:
            timer.prefill(prompt).emit()
        if options.requests:
            timer.throughput(options.requests, 1000, 1000).emit()


if __name__ == "__main__":
    main()
