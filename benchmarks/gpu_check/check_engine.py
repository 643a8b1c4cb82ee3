"""One engine on the GPU: its golden outputs, and the same answers with and without CUDA graphs.

check_engine.py ENGINE [--device cuda]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from castiron.engines import open_engine
from castiron.runtime import ModelRunner
from castiron.runtime.options import RuntimeOptions
from castiron.runtime.verify import verify
from rows import Row

from castiron.errors import CastironError

_NEW_TOKENS = 16
#: Prompts of three requests at once: 10 rows in all. Products round by classes of row counts, the smallest up
#: to 16 rows; so every step has the same arithmetic, whichever requests share it, and a step of three is
#: padded to the graph of four.
_PROMPTS = (2, 3, 5)


def compare_with_golden(engine_dir: Path, device: str) -> Row:
    """``castiron verify``: prefill and decode against transformers in float32, within the dtype's bounds."""
    engine = open_engine(engine_dir)
    engine.check_hashes()
    report = verify(engine, options=RuntimeOptions(device=device))
    note = "; ".join(report.problems[:2]) or f"mean KL {report.mean_kl:.2g}, {report.rows} rows"
    return Row(
        "tiny engines: against transformers",
        engine_dir.name,
        passed=report.passed,
        value=report.max_abs_error,
        unit="max error",
        note=note,
    )


def answers(engine_dir: Path, device: str, cuda_graphs: bool) -> tuple[list[Any], int]:
    """Tokens and log-probabilities, and the number of steps that replayed a graph."""
    with ModelRunner.from_dir(engine_dir, device=device, cuda_graphs=cuda_graphs) as runner:
        last = runner.session.info.vocab_size - 1
        prompts = [[3 + (7 * length + 11 * i) % (last - 3) for i in range(length)] for length in _PROMPTS]
        found: list[Any] = []
        for logprobs in (None, 5):
            results = runner.generate(
                input_ids=prompts,
                max_new_tokens=_NEW_TOKENS,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                logprobs=logprobs,
            )
            for result in results:
                output = result.outputs[0]
                found.append((result.error, output.token_ids, output.logprobs))
        return found, int(runner.stats()["graph_steps"])


def compare_graphs(engine_dir: Path, device: str) -> Row:
    """Replayed steps must give the bits of the same steps launched kernel by kernel."""
    eager, none = answers(engine_dir, device, cuda_graphs=False)
    replayed, steps = answers(engine_dir, device, cuda_graphs=True)
    problem = ""
    errors = [str(answer[0]) for answer in (*eager, *replayed) if answer[0] is not None]
    if errors:
        problem = errors[0]
    elif eager != replayed:
        problem = "tokens or log-probabilities differ between launched and replayed steps"
    elif none or not steps:
        problem = f"{steps} steps replayed a graph with graphs on, {none} with graphs off"
    return Row(
        "tiny engines: graph replay equals launches",
        engine_dir.name,
        passed=not problem,
        value=steps,
        unit="steps",
        note=problem,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    try:
        compare_with_golden(options.engine, options.device).emit()
        compare_graphs(options.engine, options.device).emit()
    except CastironError as error:
        words = str(error).removeprefix(f"{options.engine} ")
        Row("tiny engines: against transformers", options.engine.name, passed=False, note=words).emit()


if __name__ == "__main__":
    main()
