"""Many short requests through one engine, and what they leave behind: memory, blocks, errors.

    python benchmarks/soak.py ENGINE --requests 50000

Requests of random lengths come and go, some cancelled, some with stop strings, log-probabilities, beams or a
shared beginning. The system gives memory for a KV block when it is first used. So the engine gets no more
blocks than the clients need, and counting begins when the cache has evicted as many as there are. From then
on resident memory is read after every twentieth of the requests, with the engine idle. Exits with 1 when it
has grown, when a block is lost, or when a request ends with an error.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from castiron.engines import open_engine
from castiron.runtime import ModelRunner, SamplingParams

#: Growth that passes for noise: allocators keep a few pages more of the largest batch.
NOISE_MIB = 8.0
PARTS = 20
CLIENTS = 32
#: For each client; a beam search with the longest prompt takes six.
BLOCKS = 8
#: Requests between two looks at what was evicted; each kind is among so many.
WARM_UP = 400


def resident_mib() -> float:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def draw(rng: random.Random, shared: list[int], vocab: int, text: bool) -> tuple[list[int], SamplingParams]:
    """A prompt and how it is to be answered; ``text``: stop strings can be matched."""
    prompt = shared[: rng.randrange(len(shared))] if rng.random() < 0.5 else []
    prompt += [rng.randrange(vocab) for _ in range(rng.randint(1, 24))]
    kind = rng.random()
    new = rng.randint(1, 8)
    if kind < 0.05:
        return prompt, SamplingParams(max_tokens=new, use_beam_search=True, best_of=2, ignore_eos=True)
    return prompt, SamplingParams(
        max_tokens=new,
        temperature=rng.choice((0.0, 0.8)),
        logprobs=2 if kind < 0.15 else None,
        stop=[" the"] if kind > 0.9 and text else [],
        repetition_penalty=1.2 if 0.15 < kind < 0.25 else 1.0,
        ignore_eos=True,
    )


def serve(runner: ModelRunner, prompt: list[int], params: SamplingParams, leave: bool) -> bool:
    """One request; one that is left after its first news is cancelled. Returns whether it failed."""
    if leave:
        for result in runner.generate(input_ids=prompt, sampling_params=params, streaming=True):
            return bool(result.error)
    return any(result.error for result in runner.generate(input_ids=prompt, sampling_params=params))


def warm_up(runner: ModelRunner, run: Callable[[int], int]) -> int:
    """Requests until every KV block was used and given up; returns how many failed."""
    failed = run(WARM_UP)
    while (stats := runner.stats())["kv_blocks_evicted"] < stats["kv_blocks_total"]:
        failed += run(WARM_UP)
    return failed


@click.command(help=__doc__)
@click.argument("engine", type=click.Path(exists=True, file_okay=False))
@click.option("--requests", type=click.IntRange(min=PARTS), default=50_000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(engine: str, requests: int, seed: int) -> None:
    rng = random.Random(seed)
    opened = open_engine(engine)
    vocab, text = opened.manifest.special_tokens.vocab_size_used, opened.tokenizer_dir is not None
    # With 24 tokens of its own and 8 new ones every request fits.
    shared = [rng.randrange(vocab) for _ in range(min(100, opened.manifest.limits.max_seq_len - 32))]
    with (
        ModelRunner.from_dir(engine, kv_cache_blocks=CLIENTS * BLOCKS) as runner,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):

        def run(count: int) -> int:
            """``count`` requests, ``CLIENTS`` at a time; returns how many failed."""
            drawn = [(*draw(rng, shared, vocab, text), rng.random() < 0.05) for _ in range(count)]
            failed = sum(clients.map(lambda request: serve(runner, *request), drawn))
            gc.collect()
            return failed

        failed = warm_up(runner, run)
        memory = [resident_mib()]
        warm_tokens, begin = runner.stats()["generated_tokens"], time.monotonic()
        click.echo(f"{'warm':>8}           {memory[0]:8.1f} MiB resident")
        for part in range(PARTS):
            failed += run(requests // PARTS)
            memory.append(resident_mib())
            click.echo(f"{(part + 1) * (requests // PARTS):>8} requests  {memory[-1]:8.1f} MiB resident")
        seconds = time.monotonic() - begin
        time.sleep(1.0)  # idle, the engine checks the accounts of its cache
        stats = runner.stats()
    grown = memory[-1] - memory[0]
    lost = stats["kv_blocks_total"] - stats["kv_blocks_free"] - stats["kv_blocks_cached"]
    click.echo(
        f"{requests / seconds:.0f} requests/s, {(stats['generated_tokens'] - warm_tokens) / seconds:.0f} "
        f"tokens/s; memory grew by {grown:+.1f} MiB; {failed} errors, {lost} KV blocks lost"
    )
    sys.exit(grown > NOISE_MIB or lost != 0 or failed > 0 or stats["kv_integrity_error"] != "")


if __name__ == "__main__":
    main()
