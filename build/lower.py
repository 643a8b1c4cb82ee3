"""Lowering: the rewritten graph becomes a program for one target."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from castiron.errors import BuildError

from ..engines.program import PROGRAM_FORMAT, KvLayer, Limits, Program, Step, Value, WeightDType
from ..graph import ops as names
from ..plugins import Op, Registry, default_registry
from .memory import MemoryPlan, memory_plan
from .operands import GraphView
from .packing import PackedSource
from .steps import StepList
from .weight_table import WeightTable
from .weights import WeightGraph

#: Build dtypes and what a host program stores for them.
WEIGHT_DTYPES: dict[str, WeightDType] = {"float32": "f32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Decision:
    """Which tactic an op got, for the build report."""

    op: str
    tactic: str
    count: int


@dataclass(frozen=True)
class Lowered:
    """A program, where its weights come from, and what it will reserve."""

    program: Program
    #: By weight name, in the order of first use: the stored form and what fills it.
    sources: dict[str, PackedSource]
    memory: MemoryPlan
    decisions: tuple[Decision, ...]


def lower(
    model: onnx.ModelProto, target: str, limits: Limits, dtype: str, registry: Registry | None = None
) -> Lowered:
    """Lower a graph that has been through the passes.

    ``dtype``: "bfloat16" or "float32", the type of matrices and of the KV cache; vectors stay float32.
    Raises BuildError when an op has no tactic, or when the limits do not fit the model.
    """
    if target != "host":
        raise BuildError(f"unknown target {target!r}; this castiron builds for: host")
    if dtype not in WEIGHT_DTYPES:
        raise BuildError(f"unknown dtype {dtype!r}; expected one of {', '.join(WEIGHT_DTYPES)}")
    registry = registry or default_registry()
    graph = GraphView(model)
    steps = StepList(graph.inputs(), names.LOGITS)
    weights = WeightTable(WeightGraph(model), WEIGHT_DTYPES[dtype])
    chosen: dict[tuple[str, str], int] = {}
    for op in graph.ops():
        _check_table_length(op, limits)
        tactic = registry.choose(op, target, limits.max_num_tokens)
        chosen[op.kind, tactic.name] = chosen.get((op.kind, tactic.name), 0) + 1
        steps.append(op, tactic.lower(op), weights)
    steps.finish()
    planned = steps.plan(limits)
    logits = next(value for value in planned.values if value.name == names.LOGITS)
    stored = weights.finish()
    layers = _kv_layers(steps, WEIGHT_DTYPES[dtype])
    program = Program(
        format=PROGRAM_FORMAT,
        target=target,
        vocab_size=_vocab_size(logits),
        limits=limits,
        arena_bytes=planned.arena_bytes,
        values=planned.values,
        weights=[source.weight for source in stored.values()],
        steps=[
            Step(
                kernel=call.kernel,
                inputs=list(call.inputs),
                weights=[weights.name_of(use) for use in call.weights],
                outputs=list(call.outputs),
                attrs=dict(call.attrs),
            )
            for call in steps.calls
        ],
        kv_layers=layers,
    )
    memory = memory_plan(program.weights, layers, planned.arena_bytes, limits)
    decisions = tuple(Decision(op, tactic, count) for (op, tactic), count in sorted(chosen.items()))
    return Lowered(program, stored, memory, decisions)


def _vocab_size(logits: Value) -> int:
    if len(logits.shape) != 2 or logits.shape[0] != names.ROWS or not isinstance(logits.shape[1], int):
        raise BuildError(f"the graph's logits have shape {logits.shape}; expected [N, vocab]")
    return logits.shape[1]


def _check_table_length(op: Op, limits: Limits) -> None:
    """A learned position table that is shorter than max_seq_len would be read past its end."""
    if op.kind != "castiron.Embedding":
        return
    ids, table = op.required(0), op.required(1)
    rows = int(table.shape[0]) - int(op.attrs.get("index_offset", 0))
    if ids.name == names.POSITIONS and rows < limits.max_seq_len:
        raise BuildError(
            f"max_seq_len is {limits.max_seq_len}, but the model's position table {table.name!r} has rows "
            f"for {rows} positions only; build with --max-seq-len {rows} or less"
        )


def _kv_layers(steps: StepList, dtype: WeightDType) -> list[KvLayer]:
    layers: dict[int, KvLayer] = {}
    for call in steps.calls:
        if call.kernel in ("write_kv", "rope_write_kv"):
            sizes = {name: call.attrs[name] for name in ("kv_heads", "head_dim", "v_head_dim")}
            index = call.attrs["layer"]
            assert isinstance(index, int)
            layers[index] = KvLayer.model_validate({**sizes, "dtype": dtype})
    if sorted(layers) != list(range(len(layers))):
        raise BuildError(f"cache layers are {sorted(layers)}; expected them numbered from 0 without gaps")
    return [layers[index] for index in range(len(layers))]
