"""Storage types: which activations of a CUDA program lie in memory as bf16 or f16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from ..plugins import Op

#: Operands that a kernel feeds to a matrix unit or to the KV cache, which hold half precision anyway:
#: storing them so changes no result and halves their traffic.
_READ_AS_HALF: dict[str, tuple[int, ...]] = {
    "castiron.Linear": (0,),
    "castiron.GatedLinear": (0,),
    "castiron.ExpertLinear": (0,),
    "castiron.ExpertGatedLinear": (0,),
    "castiron.RopeWriteKV": (0, 1, 2),
    "castiron.WriteKV": (0, 1),
    "castiron.PagedAttention": (0,),
}
#: Ops that hand numbers on: input 0 is read as half where all outputs are stored as half.
_PASSES_ON = frozenset(("castiron.GatherRows", "castiron.PagedRope", "Reshape", "Identity"))
#: Ops whose outputs are column views: base and views share one dtype.
_VIEWS = frozenset(("Split", "Slice"))


def half_values(ops: Sequence[Op], keep: Iterable[str]) -> set[str]:
    """Names of the values that are stored in half precision: those that every reader reads as half.

    ``ops`` in topological order; ``keep`` are values that stay float32 (the logits).
    """
    keep = set(keep)
    #: Readers seen so far all read half; ops are walked backwards, so outputs are decided before inputs.
    wanted: dict[str, bool] = {}
    tied: list[Op] = []
    for op in reversed(ops):
        outputs_half = all(wanted.get(output.name, False) for output in op.outputs)
        for index, operand in enumerate(op.inputs):
            if operand is None or operand.constant or operand.dtype != "f32":
                continue
            half = index in _READ_AS_HALF.get(op.kind, ())
            if index == 0 and op.kind in (*_PASSES_ON, *_VIEWS):
                half = outputs_half
            wanted[operand.name] = wanted.get(operand.name, True) and half
        if op.kind in _VIEWS:
            tied.append(op)
    for op in reversed(tied):  # in topological order: a view of a view takes the dtype of the first base
        base = op.required(0).name
        for output in op.outputs:
            wanted[output.name] = wanted.get(base, False)
    return {name for name, half in wanted.items() if half and name not in keep}


def with_storage(op: Op, halves: set[str], half: Literal["f32", "bf16", "f16"]) -> Op:
    """``op`` with the storage dtype in its operands."""
    inputs = tuple(o if o is None or o.name not in halves else replace(o, dtype=half) for o in op.inputs)
    outputs = tuple(replace(o, dtype=half) if o.name in halves else o for o in op.outputs)
    return replace(op, inputs=inputs, outputs=outputs)
