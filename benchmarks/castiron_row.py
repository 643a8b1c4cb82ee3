"""One engine of castiron, measured as ``peers.py`` measures the peers; runs in a process of its own.

  castiron_row.py ENGINE [--threads 2] [--repeat 5] [--batch 8,32] [--reference ref.json]

Prompts are random token ids, different for each request; EOS is ignored; greedy.

  decode   tokens/s of one request, prompt 32, the 128 tokens after the first
  prefill  512 / seconds to process a prompt of 512 and give one token
  xN       N requests at once, prompt 128, 128 new tokens each: N*128 / wall time (prefill included)
  load     seconds from a warm page cache to ready, imports not counted
  rss      peak MiB after the xN runs
  same     greedy tokens equal to the reference's, up to the first other one
  other    CPUs' worth of work that other processes did meanwhile (0 = idle machine)

Rates are of the fastest call; ``median`` holds the same from the median calls.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from idle import Timing, time_calls


def measure(
    engine: str, threads: int, repeat: int, batch: list[int], budget: float, reference: Path | None
) -> dict[str, Any]:
    from castiron.runtime.bench import random_prompts

    from castiron import ModelRunner

    began = time.perf_counter()
    runner = ModelRunner.from_dir(engine, num_threads=threads)
    row: dict[str, Any] = {"load": time.perf_counter() - began}

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        results = runner.generate(
            input_ids=prompts, max_new_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False
        )
        for result in results:
            if result.error is not None:
                raise SystemExit(f"{engine}: {result.error}")
        return [r.outputs[0].token_ids for r in results]

    if reference is not None:
        ref = json.loads(reference.read_text())
        found = generate([ref["prompt"]], len(ref["tokens"]))[0]
        pairs = enumerate(zip(found, ref["tokens"], strict=False))
        row["same"] = next((i for i, (a, b) in pairs if a != b), min(len(found), len(ref["tokens"])))

    rng = random.Random(time.time_ns())
    vocab = min(49000, runner.session.info.vocab_size)

    def timed(requests: int, length: int, count: int) -> list[Timing]:
        def call() -> None:
            generate(random_prompts(requests, length, vocab, rng), count)

        return time_calls(call, repeat, budget)

    timed(1, 512, 1)  # warm-up
    prefill, long, short = timed(1, 512, 1), timed(1, 32, 129), timed(1, 32, 1)
    many = {n: timed(n, 128, 128) for n in batch}

    def rates(pick: Callable[[list[Timing]], float]) -> dict[str, float]:
        decode = pick(long) - pick(short)
        return {
            "decode": 128 / decode,
            "prefill": 512 / pick(prefill),
            **{f"x{n}": n * 128 / pick(timings) for n, timings in many.items()},
        }

    row |= rates(lambda timings: min(t.seconds for t in timings))
    row["median"] = rates(lambda timings: statistics.median(t.seconds for t in timings))
    best = [min(timings, key=lambda t: t.seconds) for timings in (prefill, long, short, *many.values())]
    row["other"] = max(t.others for t in best)
    row["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    stats = runner.stats()
    row |= {"isa": stats["isa"], "threads": stats["num_threads"], "decode_bytes": decode_bytes(engine)}
    runner.close()
    return row


def decode_bytes(engine: str) -> int:
    """Bytes that one decode step of one request must read: all weights but a table that only gives rows away,
    of experts those that a token takes, and the keys and values of the 96 tokens that are in the cache on
    average (prompt 32, 128 new).
    """
    from castiron.engines import layout_bytes, open_engine
    from castiron.engines.program import ITEM_BYTES

    program = open_engine(engine).program("host")
    tables = {w for step in program.steps if step.kernel == "embedding" for w in step.weights}
    read = {w for step in program.steps if step.kernel != "embedding" for w in step.weights}
    shapes = {value.name: value.shape for value in program.values}
    picked: dict[str, float] = {}
    for step in program.steps:
        if "experts" in step.attrs:
            picks = int(shapes[step.outputs[0]][1])
            picked |= dict.fromkeys(step.weights, picks / int(step.attrs["experts"]))
    weights = sum(
        layout_bytes(w) * picked.get(w.name, 1)
        for w in program.weights
        if w.name in read or w.name not in tables
    )
    layers = program.kv_layers
    cache = sum(96 * k.kv_heads * (k.head_dim + k.v_head_dim) * ITEM_BYTES[k.dtype] for k in layers)
    return int(weights + cache)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--batch", type=lambda s: [int(x) for x in s.split(",")], default=[8, 32])
    parser.add_argument(
        "--budget", type=float, default=60.0, help="seconds to go on trying while others disturb"
    )
    parser.add_argument("--reference", type=Path)
    a = parser.parse_args()
    row = measure(a.engine, a.threads, a.repeat, a.batch, a.budget, a.reference)
    print("RESULT " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
