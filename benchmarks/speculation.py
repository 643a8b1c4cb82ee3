"""What speculative decoding does to one request's speed: texts that copy their prompt, and texts at random.

    python benchmarks/speculation.py ENGINE --method suffix --rounds 5

Each task runs without and with speculation in turn, in one process; the outputs must be equal. Printed are
tokens/s of the best and of the median round, their ratios, and how many guesses were right.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from castiron import ModelRunner

_ARTICLE = (
    "The lighthouse at Cape Moran was built in 1871, after eleven ships had been lost on the reef within "
    "a single winter. Its first keeper, a retired sailor named Aldous Finch, lived there with his wife "
    "and four children for twenty-six years. The lamp burned whale oil until 1889, when it was converted "
    "to kerosene, and electricity arrived only in 1934. Today the tower is a museum. Visitors climb the "
    "142 steps to the gallery, from which the reef can be seen at low tide, and read the keeper's log, "
    "which records every storm, every passing ship and every visitor of those years."
)
_CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance = self.balance + amount

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        if amount > self.balance:
            raise ValueError("the balance is too low")
        self.balance = self.balance - amount
"""
_COPIES = {
    "edit": f"Rewrite this text with Cape Moran changed to Cape Doran, and nothing else:\n\n{_ARTICLE}",
    "summarise": f"Summarise this text by quoting its most important sentences:\n\n{_ARTICLE}",
    "code": f"Write this Python class again with balance renamed to total:\n\n{_CODE}",
}


def tasks(length: int) -> dict[str, dict[str, Any]]:
    """Arguments of ``chat`` or ``generate`` by the task's name."""
    common = {"max_new_tokens": length, "ignore_eos": True}
    found: dict[str, dict[str, Any]] = {}
    for name, text in _COPIES.items():
        found[name] = {"messages": [{"role": "user", "content": text}], **common}
    ids = [(7919 * i * i + 104729 * i) % 40000 + 100 for i in range(128)]
    for seed in (1, 2):
        found[f"random {seed}"] = {"input_ids": ids[seed * 10 :], "temperature": 1.0, "seed": seed, **common}
    return found


def run(runner: ModelRunner, task: dict[str, Any]) -> tuple[list[int], float]:
    """The output's tokens and the seconds of the call; all but its first round finds the prompt cached."""
    began = time.perf_counter()
    (result,) = runner.chat(**task) if "messages" in task else runner.generate(**task)
    return list(result.outputs[0].token_ids), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--method", choices=["ngram", "suffix"], default="suffix")
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=160, help="tokens of each output")
    args = parser.parse_args()
    plain = ModelRunner.from_dir(args.engine, num_threads=args.num_threads)
    quick = ModelRunner.from_dir(
        args.engine,
        num_threads=args.num_threads,
        speculative_decoding=args.method,
        num_speculative_tokens=args.num_speculative_tokens,
    )
    print(
        f"{'task':12} {'plain':>14} {args.method:>14} {'ratio':>13} {'right':>11}   (tokens/s: best, median)"
    )
    with plain, quick:
        for name, task in tasks(args.length).items():
            expected = run(plain, task)[0]
            run(quick, task)
            before = quick.stats()
            seconds: dict[ModelRunner, list[float]] = {plain: [], quick: []}
            for _ in range(args.rounds):
                for runner in (plain, quick):
                    tokens, spent = run(runner, task)
                    if tokens != expected:
                        raise SystemExit(f"{name}: the output changed")
                    seconds[runner].append(spent)
            after = quick.stats()
            right, drafted = (after[k] - before[k] for k in ("accepted_tokens", "draft_tokens"))
            speeds = [
                [len(expected) / pick(seconds[runner]) for pick in (min, statistics.median)]
                for runner in (plain, quick)
            ]
            ratios = [q / p for p, q in zip(*speeds, strict=True)]
            columns = [*(f"{best:6.1f} {median:6.1f}" for best, median in speeds)]
            print(
                f"{name:12} {columns[0]:>14} {columns[1]:>14} {ratios[0]:6.2f} {ratios[1]:6.2f} "
                f"{right:5} /{drafted:5}",
                flush=True,
            )


if __name__ == "__main__":
    main()
