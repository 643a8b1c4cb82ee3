"""Trying a plugin: each example of each op by each of its tactics, against the op's reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from castiron.errors import BuildError

from ...engines.cuda_layout import KvLayout, kv_layout
from ...engines.program import Limits
from ...plugins.sdk import Plugin
from ...plugins.tactic import Call, Context, Lowering, Op, Operand, Tactic
from ...plugins.targets import TARGETS, Target
from .cases import Case, make_case
from .compiled import check_compiles
from .job import TrialAnswer
from .paged import MAX_SEQ_LEN
from .runs import Storage, may_be_view, run_lowering

_LIMITS = Limits(max_batch_size=4, max_num_tokens=32, max_logit_rows=8, max_seq_len=MAX_SEQ_LEN)
#: bfloat16 keeps 8 bits: an operand is off by at most this part of itself, and the result rounds once more.
_HALF_ROUNDING = 2.0**-8


@dataclass(frozen=True)
class _Variant:
    """How operands and results are stored, and whether matrices are column views of wider ones."""

    name: str
    inputs: Storage
    outputs: Storage
    views: bool = False


#: On host the first two.
_VARIANTS = (
    _Variant("f32", "f32", "f32"),
    _Variant("f32 column views", "f32", "f32", views=True),
    _Variant("bf16", "bf16", "bf16"),
    _Variant("bf16 column views", "bf16", "bf16", views=True),
    _Variant("f32 to bf16", "f32", "bf16"),
)


@dataclass(frozen=True)
class TrialResult:
    """One run. ``variant``: how operands were stored. ``error``: None where nothing could be compared."""

    op: str
    tactic: str
    target: str
    variant: str
    error: float | None = None
    tolerance: float | None = None
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether the tactic computed what the reference says."""
        return not self.problem


def try_plugin(plugin: Plugin, file: Path, targets: Sequence[str]) -> Iterator[TrialResult]:
    """Run every example of a plugin on every target, and yield each result as it comes.

    Raises BuildError for an example that makes no sense (an unknown op, a reference of another shape).
    """
    if not plugin.examples:
        raise BuildError(
            f"plugin {plugin.name!r} has no examples to try; give it castiron.plugins.sdk.Example objects"
        )
    for number, example in enumerate(plugin.examples):
        case = make_case(plugin, example, number)
        tactics = [tactic for tactic in plugin.tactics if tactic.kind == example.op]
        if not tactics:
            raise BuildError(f"example {number} is of {example.op}, which no tactic of the plugin computes")
        for tactic in tactics:
            trial = _TacticTrial(case, tactic, file)
            for target in (TARGETS[name] for name in targets):
                if tactic.family == target.family:
                    yield from trial.on(target)


class _TacticTrial:
    """One tactic on one case: on every target it is compiled, and run wherever it asks for something new."""

    def __init__(self, case: Case, tactic: Tactic, file: Path) -> None:
        self._case, self._tactic, self._file = case, tactic, file
        self._ran: list[tuple[_Variant, Lowering, TrialAnswer]] = []

    def on(self, target: Target) -> Iterator[TrialResult]:
        """Results for one target."""
        base = TrialResult(self._case.op.kind, self._tactic.name, target.name, "-")
        accepted = False
        for variant in _VARIANTS if target.family == "cuda" else _VARIANTS[:2]:
            result = replace(base, variant=variant.name)
            try:
                lowering = self._lower(target, variant)
                if lowering is None:
                    continue
                accepted = True
                check_compiles(lowering, target)
                yield _compare(self._case, self._answer(variant, lowering), result, variant)
            except BuildError as error:
                accepted = True
                yield replace(result, problem=str(error))
            except Exception as error:
                accepted = True
                yield replace(result, problem=f"its tactic failed: {type(error).__name__}: {error}")
        if not accepted:
            yield replace(base, problem="it does not accept the example")

    def _lower(self, target: Target, variant: _Variant) -> Lowering | None:
        """What the tactic makes of the variant; None where it does not apply."""
        op = _stored(self._case.op, variant)
        on_gpu = target.family == "cuda"
        context = Context(target, "bf16", _LIMITS, self._kv() if on_gpu else None, 64 if on_gpu else 0)
        if variant.views and not any(map(may_be_view, op.inputs)):
            return None
        if not self._tactic.accepts(op, context):
            return None
        lowering = self._tactic.lower(op, context)
        takes_views = any(isinstance(action, Call) and action.takes_views for action in lowering.actions)
        return None if variant.views and not takes_views else lowering

    def _kv(self) -> KvLayout:
        paged = self._case.paged
        return kv_layout([]) if paged is None else paged.layout

    def _answer(self, variant: _Variant, lowering: Lowering) -> TrialAnswer:
        for known, like, answer in self._ran:
            if known == variant and like == lowering:
                return answer
        op = _stored(self._case.op, variant)
        answer = run_lowering(self._case, op, lowering, self._file, variant.inputs, views=variant.views)
        self._ran.append((variant, lowering, answer))
        return answer


def _stored(op: Op, variant: _Variant) -> Op:
    def convert(operand: Operand | None) -> Operand | None:
        return operand if operand is None or operand.constant else replace(operand, dtype=variant.inputs)

    outputs = tuple(replace(operand, dtype=variant.outputs) for operand in op.outputs)
    return replace(op, inputs=tuple(map(convert, op.inputs)), outputs=outputs)


def _compare(case: Case, answer: TrialAnswer, result: TrialResult, variant: _Variant) -> TrialResult:
    if answer.problem:
        return replace(result, problem=answer.problem)
    worst, limit = 0.0, 0.0
    for index, expected in enumerate(case.expected):
        found = answer.results[f"y{index}"].astype(np.float32)
        scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
        limit = (case.example.tolerance + (4 * _HALF_ROUNDING if variant.outputs == "bf16" else 0.0)) * scale
        wrong = ~(np.abs(found - expected) <= limit)
        worst = max(worst, float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max(initial=0.0)))
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            return replace(
                result, error=worst, tolerance=limit,
                problem=f"{int(wrong.sum())} of {wrong.size} elements are off; the first, "
                f"y{index}{list(first)}, is {found[first]:.7g}, and by the reference "
                f"{expected[first]:.7g} ({limit:.2g} apart at most)",
            )  # fmt: skip
    return replace(result, error=worst, tolerance=limit)
