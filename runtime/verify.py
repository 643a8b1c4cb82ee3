"""Does an engine, on this machine, still answer what its source model answered? The check behind ``castiron
verify``.

Two comparisons:

prefill  For prompts of several lengths, the logits of every golden row against the source model's. decode
Greedy continuation by the running engine. Its token log-probabilities are compared with the golden decode
         rows where it follows the golden continuation, and everywhere with the engine's own prefill of the
         same text, which the first comparison has tied to the source: the two differ only by the kernel path.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from castiron.errors import EngineError

from ..engines import Engine, GoldenSequence
from ..engines.program import BLOCK_TOKENS
from .core_api import Core
from .devices import DeviceChoice
from .loading import load_core
from .options import RuntimeOptions
from .probe import Probe
from .verify_report import PromptReport, VerifyReport, tolerance_for

Floats = npt.NDArray[np.float32]
#: Prompts are cut from a golden sequence at these lengths: one token, a partial and a full KV block, several
#: blocks.
_LENGTHS = (1, 7, 31, 32, 40)
_DECODE_TOKENS = 12


class Runner(Protocol):
    """A running engine: the core, and how to make its sampling parameters."""

    core: Core
    #: Where the engine runs; None for a stand-in that computes as the host does.
    choice: DeviceChoice | None
    #: Makes an empty ``_core.SamplingParams``.
    make_params: Callable[[], Any]


class CoreRunner:
    """``_core.Engine`` with a KV cache just large enough for the golden prompts; a context manager."""

    def __init__(self, engine: Engine, tokens: int, options: RuntimeOptions | None = None) -> None:
        """Load the weights; ``tokens`` is the length of the longest prompt and its continuation."""
        least = replace(
            options or RuntimeOptions(),
            max_batch_size=1,
            enable_prefix_caching=False,  # every token is to be computed
            kv_cache_blocks=-(-min(tokens, engine.manifest.limits.max_seq_len) // BLOCK_TOKENS) + 1,
        )
        used = engine.manifest.special_tokens.vocab_size_used
        loaded = load_core(engine, least, vocab_limit=used)
        self.core: Core = loaded.core
        self.choice: DeviceChoice | None = loaded.choice
        self.make_params: Callable[[], Any] = loaded.module.SamplingParams

    def __enter__(self) -> CoreRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.shutdown()


def verify(
    engine: Engine,
    runner: Runner | None = None,
    *,
    options: RuntimeOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Compare ``engine`` with its golden outputs.

    runner: a running engine; by default one is started with ``options``, and ended.
    progress: called with (prompts done, prompts in all).

    Raises EngineError when the engine was built without golden outputs, cannot be loaded, or a request fails.
    """
    sequences = engine.golden()
    if sequences is None:
        raise EngineError(
            f"{engine.path} was built with --verify never and holds no golden outputs. Rebuild it: "
            f"{engine.rebuild_command}"
        )
    if runner is not None:
        return _Verifier(engine, runner, progress).run(sequences)
    longest = max(len(sequence.tokens) for sequence in sequences)
    with CoreRunner(engine, longest + _DECODE_TOKENS, options) as started:
        return _Verifier(engine, started, progress).run(sequences)


class _Verifier:
    def __init__(self, engine: Engine, runner: Runner, progress: Callable[[int, int], None] | None) -> None:
        self.runner = runner
        self.probe = Probe(runner.core, runner.make_params)
        self.progress = progress
        quantization = engine.manifest.quantization
        activations: frozenset[str] = frozenset()
        cache = "auto"
        if quantization is not None:
            activations, cache = quantization.activations, quantization.kv_cache_dtype
        self.tolerance = tolerance_for(
            engine.manifest.model.dtype,
            runner.choice,
            activations,
            cache,
            rounds_by_itself=not activations and _rounds(engine, runner.choice),
            routes=_routes(engine, runner.choice),
        )
        self.max_seq_len = engine.manifest.limits.max_seq_len
        #: Columns that exist in the tokenizer: only these are ever sampled.
        self.used = engine.manifest.special_tokens.vocab_size_used
        self.prompts: list[PromptReport] = []
        self.problems: list[str] = []
        self.squares = np.zeros(2)  # sums of squared errors, and of squared centered golden logits

    def run(self, sequences: Sequence[GoldenSequence]) -> VerifyReport:
        start = time.perf_counter()
        plan = [(index, length) for index, s in enumerate(sequences) for length in _lengths(len(s.tokens))]
        for done, (index, length) in enumerate(plan):
            self.prefill(index, sequences[index], length)
            self.report_progress(done + 1, len(plan) + len(sequences))
        for index, sequence in enumerate(sequences):
            self.decode(index, sequence)
            self.report_progress(len(plan) + index + 1, len(plan) + len(sequences))
        rows = _weights(self.prompts, "prefill")
        decoded = [p for p in self.prompts if p.phase == "decode"]
        prefilled = [p for p in self.prompts if p.phase == "prefill"]
        relative = float(np.sqrt(self.squares[0] / max(self.squares[1], 1e-30)))
        mean_kl = float(np.average([p.mean_kl for p in prefilled], weights=rows))
        if not relative <= self.tolerance.relative:
            self.problems.append(
                f"prefill: the error is {relative:.3g} of the logits' spread; at most "
                f"{self.tolerance.relative:g} is expected"
            )
        if not mean_kl <= self.tolerance.mean_kl:
            self.problems.append(
                f"prefill: mean KL is {mean_kl:.3g}; at most {self.tolerance.mean_kl:g} is expected"
            )
        return VerifyReport(
            passed=not self.problems,
            max_abs_error=max(p.max_abs_error for p in prefilled),
            mean_kl=mean_kl,
            top1_agreement=float(np.average([p.top1_agreement for p in prefilled], weights=rows)),
            relative_error=relative,
            rows=sum(rows),
            decode_max_abs_error=max((p.max_abs_error for p in decoded), default=0.0),
            decode_rows=sum(p.rows for p in decoded),
            seconds=time.perf_counter() - start,
            prompts=self.prompts,
            problems=self.problems,
            device=None if self.runner.choice is None else str(self.runner.choice),
        )

    def report_progress(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(done, total)

    def prefill(self, index: int, sequence: GoldenSequence, length: int) -> None:
        """Compare all golden rows of a prompt of ``length`` tokens."""
        chosen = sequence.rows < length
        golden = sequence.logits[chosen]
        found = self.probe.context_logits(sequence.tokens[:length])[sequence.rows[chosen]]
        if not len(golden):
            return
        finite = bool(np.isfinite(found).all())
        worst = float(np.abs(found - golden).max()) if finite else float("inf")
        scale = max(1.0, float(np.abs(golden).max()))
        judged = self.judged(np.abs(found - golden).max(-1))
        found, golden = found[judged], golden[judged]
        errors = np.abs(found - golden)
        centered = golden - golden.mean(-1, keepdims=True)
        self.squares += [
            np.square(errors, dtype=np.float64).sum(),
            np.square(centered, dtype=np.float64).sum(),
        ]
        agree = found.argmax(-1) == golden.argmax(-1)
        top2 = (
            np.partition(golden, -2, axis=-1)[:, -2:] if golden.shape[1] > 1 else np.zeros((len(golden), 2))
        )
        clear = top2[:, 1] - top2[:, 0] > self.tolerance.margin * scale
        problem = ""
        if not finite:
            problem = "the logits are not finite"
        elif errors.max() > self.tolerance.max_abs * scale:
            bound = self.tolerance.max_abs * scale
            problem = f"max error {errors.max():.3g}; at most {bound:.3g} is expected"
        elif not agree[clear].all():
            wrong = int((~agree[clear]).sum())
            problem = f"{wrong} rows have another top token than the source model, and not by a tie"
        kl = float(_kl(golden, found).mean()) if finite else float("inf")
        self.add(PromptReport("prefill", index, length, len(golden), worst, kl, float(agree.mean()), problem))

    def judged(self, errors: Floats) -> npt.NDArray[np.int64]:
        """Rows that count: all but the few worst that the tolerance forgives, one at least."""
        forgiven = math.ceil(self.tolerance.outliers * len(errors))
        return np.sort(np.argsort(errors, kind="stable")[: max(1, len(errors) - forgiven)])

    def decode(self, index: int, sequence: GoldenSequence) -> None:
        """Compare a greedy continuation with the golden one and with the engine's own prefill of the same
        text.
        """
        count = min(_DECODE_TOKENS, self.max_seq_len - sequence.prefix)
        if count < 1:
            return
        prompt = sequence.tokens[: sequence.prefix]
        tokens, logprobs = self.probe.generate(prompt, count)
        text = np.concatenate([prompt, np.asarray(tokens, np.int32)])
        own = _log_softmax(self.probe.context_logits(text)[len(prompt) - 1 : -1])
        scale = max(1.0, float(np.abs(sequence.logits).max()))
        own_error = self.difference(logprobs, own)
        problem = ""
        if not own_error <= self.tolerance.own * scale:
            problem = (
                f"log-probabilities differ by {own_error:.3g} from the engine's own prefill; at most "
                f"{self.tolerance.own * scale:.3g} is expected"
            )
        followed = _common_length(tokens, sequence.continuation.tolist())
        if followed < min(len(tokens), len(sequence.continuation)) and not self.tolerance.may_leave:
            self.check_divergence(index, sequence, followed, tokens[followed], scale)
        # Row k of the golden logits follows continuation[k]: token k + 1 was drawn from it.
        rows = min(followed, len(sequence.decode_logits), len(tokens) - 1)
        golden_error, kl = 0.0, 0.0
        if rows:
            golden = _log_softmax(sequence.decode_logits[:rows])
            golden_error = self.difference(logprobs[1 : rows + 1], golden)
            kl = float(_kl(sequence.decode_logits[:rows], own[1 : rows + 1]).mean())
        # A log-probability moves with its logit and with the normaliser: twice the bound of one logit.
        bound = 2 * self.tolerance.max_abs * scale
        if not golden_error <= bound:
            problem = f"log-probabilities differ by {golden_error:.3g}; at most {bound:.3g} is expected"
        agreed = float((own[:, : self.used].argmax(-1) == tokens).mean())
        worst = max(own_error, golden_error)
        self.add(PromptReport("decode", index, len(prompt), len(tokens), worst, kl, agreed, problem))

    def difference(self, found: Sequence[dict[int, float]], expected: Floats) -> float:
        """The largest difference of log-probabilities in the rows that count; NaN where one is no number."""
        rows = zip(found, expected, strict=True)
        errors = [max(abs(value - float(row[token])) for token, value in tops.items()) for tops, row in rows]
        if not np.isfinite(errors).all():
            return float("nan")
        return float(np.max(np.asarray(errors)[self.judged(np.asarray(errors, np.float32))]))

    def check_divergence(
        self, index: int, sequence: GoldenSequence, row: int, token: int, scale: float
    ) -> None:
        """A continuation may leave the golden one only where the source model nearly has a tie."""
        if row:
            logits = sequence.decode_logits[row - 1]
        else:
            logits = sequence.logits[int(np.flatnonzero(sequence.rows == sequence.prefix - 1)[0])]
        gap = float(logits[sequence.continuation[row]] - logits[token])
        if gap > self.tolerance.margin * scale:
            self.problems.append(
                f"decode: sequence {index} continues with token {token} instead of "
                f"{sequence.continuation[row]}, which leads by {gap:.3g} in the source model"
            )

    def add(self, report: PromptReport) -> None:
        self.prompts.append(report)
        if report.problem:
            where = f"{report.phase}, sequence {report.sequence}, prompt of {report.prompt_tokens}"
            self.problems.append(f"{where}: {report.problem}")


def _rounds(engine: Engine, choice: DeviceChoice | None) -> bool:
    """Whether the program that runs rounds activations to int8 of its own accord."""
    program = engine.program("host" if choice is None else choice.target)
    return any(step.attrs.get("x_format") == "int8" for step in program.steps)


def _routes(engine: Engine, choice: DeviceChoice | None) -> bool:
    """Whether tokens go to experts."""
    program = engine.program("host" if choice is None else choice.target)
    return any("expert" in step.kernel for step in program.steps)


def _lengths(longest: int) -> list[int]:
    return sorted({length for length in (*_LENGTHS, longest) if length <= longest})


def _weights(prompts: Sequence[PromptReport], phase: str) -> list[int]:
    return [prompt.rows for prompt in prompts if prompt.phase == phase]


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _kl(golden: Floats, found: Floats) -> npt.NDArray[np.float64]:
    """Return KL(golden ‖ found) of each row, in nats."""
    p, q = (_log_softmax(np.asarray(logits, np.float64)) for logits in (golden, found))
    # Never negative, but for rounding.
    return np.asarray(np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0), np.float64)


def _common_length(one: Sequence[int], two: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
