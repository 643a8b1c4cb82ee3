"""Lowers one op by one tactic and runs it in the interpreter, temporaries, copies and views included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from castiron.engines.program import Limits
from castiron.plugins import Call, Context, Op, Operand, Tactic
from castiron.plugins.targets import TARGETS
from interpret import TORCH, run_call

LIMITS = Limits(max_batch_size=8, max_num_tokens=512, max_logit_rows=8, max_seq_len=64)


def context(target: str = "sm_90", half: Any = "bf16") -> Context:
    return Context(TARGETS[target], half, LIMITS)


def to_torch(array: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(TORCH[dtype])


def run(
    tactic: Tactic,
    kind: str,
    inputs: list[tuple[Operand, torch.Tensor | None] | None],
    outputs: list[Operand],
    attrs: Mapping[str, Any] | None = None,
    counts: Mapping[str, int] | None = None,
    in_context: Context | None = None,
) -> list[torch.Tensor]:
    """The results. Weights (constant operands) are given in the type that their role stores."""
    counts = counts or {}
    in_context = in_context or context()
    op = Op(kind, tuple(None if i is None else i[0] for i in inputs), tuple(outputs), attrs or {})
    assert tactic.accepts(op, in_context)
    lowering = tactic.lower(op, in_context)
    tensors = {i[0].name: i[1] for i in inputs if i is not None and i[1] is not None}

    def fresh(operand: Operand) -> torch.Tensor:
        shape = [counts[dim] if isinstance(dim, str) else dim for dim in operand.shape]
        if operand.dtype == "i32":
            return torch.full(shape, -(1 << 30), dtype=torch.int32)
        return torch.full(shape, torch.nan, dtype=TORCH[operand.dtype])

    produced = {o.name: o for o in (*outputs, *lowering.temporaries)}
    for action in lowering.actions:
        if not isinstance(action, Call):
            base = tensors[action.base]
            shape = [counts[dim] if isinstance(dim, str) else dim for dim in action.shape]
            if action.column is None:
                tensors[action.name] = base.contiguous().reshape(shape)
            else:
                tensors[action.name] = base[:, action.column : action.column + shape[1]]
            continue
        values = dict(tensors)
        for name in action.inputs:
            if not action.takes_views:
                values[name] = tensors[name].contiguous()
        for name in action.outputs:
            if name not in tensors:
                tensors[name] = values[name] = fresh(produced[name])
        weights = [torch.cat([tensors[part] for part in use.parts]) for use in action.weights]
        run_call(action, values, weights, counts, step=tensors)
    return [tensors[o.name] for o in outputs]


def assert_close(found: torch.Tensor, expected: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Results in half may be off by half a step of their precision besides."""
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(found.dtype, 0.0)
    numbers = np.asarray(expected, np.float64)
    np.testing.assert_allclose(found.double().numpy(), numbers, rtol=rtol + step, atol=atol)
