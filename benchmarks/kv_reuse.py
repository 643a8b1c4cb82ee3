"""What the prefix cache saves and what preemption costs, on one engine.

    python benchmarks/kv_reuse.py ENGINE [--users 8] [--turns 10] [--sharing 256] [--json FILE]

chat          users talk in turns; every turn sends the whole conversation again. Prompt tokens computed, and
              the median time to the first token of the last turn, with and without the cache.
shared prefix requests at once that begin with the same 1,000 tokens: requests/s with and without the cache
              (without: an eighth of them, because the rate is all that counts).
preemption    32 requests in a KV pool for all of them, and in one of half the size under max_utilization,
              which sets requests back: output tokens/s. What is set back is computed again, or comes back
              from a host tier (--kv-cache-host-tier).

Token ids are random, decoding is greedy, EOS is ignored.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from castiron import ModelRunner

_SYSTEM, _QUESTION, _ANSWER = 200, 48, 48  # tokens
_PREFIX, _OWN, _SHORT = 1000, 24, 8


def some_ids(count: int) -> list[int]:
    return [random.randrange(100, 40000) for _ in range(count)]


def chat(engine: str, users: int, turns: int, reuse: bool) -> tuple[int, float]:
    """Prompt tokens computed in all turns; seconds to the first token in the last one, median over users."""
    random.seed(1)
    with ModelRunner.from_dir(engine, enable_prefix_caching=reuse) as runner:
        system = some_ids(_SYSTEM)
        histories = [[*system] for _ in range(users)]
        first: dict[int, float] = {}
        for _ in range(turns):
            for history in histories:
                history += some_ids(_QUESTION)
            first, began = {}, time.perf_counter()
            stream = runner.generate(
                input_ids=histories, max_new_tokens=_ANSWER, ignore_eos=True, streaming=True
            )
            answers: dict[int, list[int]] = {}
            for partial in stream:
                first.setdefault(partial.index, time.perf_counter() - began)
                answers[partial.index] = list(partial.outputs[0].token_ids)
            for user, history in enumerate(histories):
                history += answers[user]
        return runner.stats()["prompt_tokens"], statistics.median(first.values())


def shared_prefix(engine: str, requests: int, reuse: bool) -> float:
    """Requests/s."""
    random.seed(2)
    prefix = some_ids(_PREFIX)
    prompts = [[*prefix, *some_ids(_OWN)] for _ in range(requests)]
    with ModelRunner.from_dir(engine, enable_prefix_caching=reuse) as runner:
        runner.generate(input_ids=some_ids(64), max_new_tokens=2)
        began = time.perf_counter()
        runner.generate(input_ids=prompts, max_new_tokens=_SHORT, ignore_eos=True)
        return requests / (time.perf_counter() - began)


def preemption(engine: str, share: float, tier: str | None = None) -> dict[str, float]:
    """32 requests with `share` of the blocks they need: output tokens/s, set-backs, tokens computed again."""
    random.seed(3)
    requests, prompt, new = 32, 128, 256
    blocks = int(requests * -(-(prompt + new) // 32) * share)
    with ModelRunner.from_dir(
        engine,
        kv_cache_blocks=blocks,
        capacity_scheduler_policy="max_utilization",
        kv_cache_host_tier=tier,
    ) as runner:
        prompts = [some_ids(prompt) for _ in range(requests)]
        began = time.perf_counter()
        runner.generate(input_ids=prompts, max_new_tokens=new, ignore_eos=True)
        seconds, stats = time.perf_counter() - began, runner.stats()
    return {
        "tokens_per_s": requests * new / seconds,
        "set_back": stats["preemptions"],
        "recomputed": stats["recomputed_tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--sharing", type=int, default=256, help="requests of the shared prefix")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()

    warm_tokens, warm_first = chat(a.engine, a.users, a.turns, True)
    cold_tokens, cold_first = chat(a.engine, a.users, a.turns, False)
    shared, alone = shared_prefix(a.engine, a.sharing, True), shared_prefix(a.engine, a.sharing // 8, False)
    ample = preemption(a.engine, 1.0)
    scarce, tiered = preemption(a.engine, 0.5), preemption(a.engine, 0.5, "1GiB")
    report: dict[str, Any] = {
        "chat": {
            "prompt_tokens": {"reuse": warm_tokens, "none": cold_tokens, "ratio": cold_tokens / warm_tokens},
            "first_token_s": {"reuse": warm_first, "none": cold_first, "ratio": warm_first / cold_first},
        },
        "shared_prefix": {"reuse": shared, "none": alone, "ratio": shared / alone},
        "preemption": {"ample": ample, "scarce": scarce, "scarce_with_host_tier": tiered},
    }
    print(
        f"chat, {a.users} users, {a.turns} turns: {warm_tokens} prompt tokens computed instead of "
        f"{cold_tokens} ({cold_tokens / warm_tokens:.1f} times fewer); first token of the last turn after "
        f"{warm_first * 1e3:.0f} ms instead of {cold_first * 1e3:.0f} ({warm_first / cold_first:.2f})"
    )
    print(
        f"{a.sharing} requests with {_PREFIX} tokens in common: {shared:.1f} requests/s instead of "
        f"{alone:.1f} ({shared / alone:.1f} times)"
    )
    for name, half in (("half the KV blocks", scarce), ("the same with a host tier", tiered)):
        speed, most = half["tokens_per_s"], ample["tokens_per_s"]
        print(
            f"{name}: {speed:.0f} output tokens/s instead of {most:.0f} ({speed / most:.2f}); "
            f"{half['set_back']:.0f} times a request was set back, {half['recomputed']:.0f} tokens were "
            "computed again"
        )
    if a.json:
        a.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
