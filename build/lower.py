"""Lowering: the rewritten graph becomes a program for one target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx

from castiron.errors import BuildError

from ..engines.cuda_layout import kv_layout
from ..engines.program import PROGRAM_FORMAT, CacheDType, KvLayer, Limits, Program, Step
from ..engines.symbols import largest_counts
from ..graph import ops as names
from ..graph.weights import ModuleRows, ModuleWeight, WeightGraph
from ..plugins import TARGETS, Context, Lowering, Op, Operand, Registry, default_registry
from ..plugins.tactic import FEED, SAMPLE
from .adapters import adapt
from .launches import KernelRequest, LaunchTable
from .memory import MemoryPlan, memory_plan
from .modules import module_columns
from .operands import GraphView
from .packed import Packed
from .steps import StepList
from .storage import half_values, with_storage
from .weight_table import WeightPool, WeightTable

#: Build dtypes and what a program stores for them.
WEIGHT_DTYPES: dict[str, Literal["f32", "bf16", "f16"]] = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
}
_CACHE_DTYPES: dict[str, CacheDType] = {"fp8": "f8e4m3", "int8": "i8"}
#: Rows of a query tile of prefill attention (symbol P): as many as keep the matrix units of every
#: architecture busy while a tile and two stages of keys and values fit 99 KB of shared memory.
PREFILL_TILE = 128

#: Values that the runtime reads after sampling: name, dtype, columns.
_SAMPLED: tuple[tuple[str, Literal["f32", "i32"], int], ...] = (
    ("sampled", "i32", 2),
    ("sample_top_ids", "i32", 20),
    ("sample_top_logprobs", "f32", 21),
)


@dataclass(frozen=True)
class Decision:
    """Which tactic an op got, for the build report."""

    op: str
    tactic: str
    count: int


@dataclass(frozen=True)
class Lowered:
    """A program, where its weights come from, and what it will reserve.

    ``requests``: the kernels that its launches refer to, still to be compiled; empty on host.
    """

    program: Program
    #: By weight name, in the order of first use: the stored form and what fills it.
    sources: dict[str, Packed]
    memory: MemoryPlan
    decisions: tuple[Decision, ...]
    requests: tuple[KernelRequest, ...] = ()


class _Chooser:
    """Asks the registry, and counts what it answered."""

    def __init__(self, registry: Registry, context: Context) -> None:
        self._registry, self._context = registry, context
        self._chosen: dict[tuple[str, str], int] = {}

    def __call__(self, op: Op) -> Lowering:
        tactic = self._registry.choose(op, self._context, self._context.limits.max_num_tokens)
        self._chosen[op.kind, tactic.name] = self._chosen.get((op.kind, tactic.name), 0) + 1
        return tactic.lower(op, self._context)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(Decision(op, tactic, count) for (op, tactic), count in sorted(self._chosen.items()))


def lower(
    model: onnx.ModelProto,
    target: str,
    limits: Limits,
    dtype: str,
    registry: Registry | None = None,
    pool: WeightPool | None = None,
    activations: Literal["auto", "full"] = "auto",
    modules: Mapping[str, ModuleWeight] | None = None,
    lora_rank: int = 0,
) -> Lowered:
    """Lower a graph that has been through the passes.

    ``dtype``: the type of matrices and of the KV cache where they are not quantized; vectors stay float32.
    ``pool``: the weights of the engine, where several targets share it. ``activations``: see ``Context``.
    ``modules``: the weights of the captured graph's modules, for adapters; None: the engine takes none.
    ``lora_rank``: of adapters on GPUs, at most, a multiple of 16; 0: they take none. Raises BuildError when
    an op has no tactic, when the limits do not fit the model, or when adapters find no product.
    """
    if target not in TARGETS:
        raise BuildError(f"unknown target {target!r}; this castiron builds for: {', '.join(TARGETS)}")
    if dtype not in WEIGHT_DTYPES:
        raise BuildError(f"unknown dtype {dtype!r}; expected one of {', '.join(WEIGHT_DTYPES)}")
    weight_graph = pool.graph if pool else WeightGraph(model)
    graph = GraphView(model, weight_graph)
    ops = list(graph.ops())
    half = WEIGHT_DTYPES[dtype]
    layers = _kv_layers(ops, half, limits)
    on_gpu = TARGETS[target].family == "cuda"
    context = Context(
        TARGETS[target],
        half,
        limits,
        kv_layout(layers) if on_gpu else None,
        PREFILL_TILE if on_gpu else 0,
        activations,
    )
    registry = registry or default_registry((target,))
    chooser = _Chooser(registry, context)
    weights = WeightTable(pool or WeightPool(weight_graph), half, context.target.family)
    steps = StepList(graph.inputs(), names.LOGITS, weights, chooser, inputs_in_arena=not on_gpu)
    halves = half_values(ops, (names.LOGITS,)) if on_gpu else set()
    for op in ops:
        _check_table_length(op, limits)
        stored = with_storage(op, halves, half)
        steps.append(stored, chooser(stored))
    first_of_sampling, vocab_size = len(steps.calls), _vocab_size(steps)
    results = _SAMPLED if registry.implements(SAMPLE, context.target.family) else ()
    if results:
        rows = [Operand(name, (names.ROWS, width), dtype) for name, dtype, width in results]
        op = Op(SAMPLE, (Operand(names.LOGITS, (names.ROWS, vocab_size)),), tuple(rows))
        steps.append(op, chooser(op))
    first_of_feeding = len(steps.calls)
    if results and registry.implements(FEED, context.target.family):
        op = Op(FEED, (rows[0],), ())
        steps.append(op, chooser(op))
    modules = modules if modules is not None and (lora_rank or not on_gpu) else {}
    columns = module_columns(steps.calls, ModuleRows(model, weight_graph, modules), modules)
    slots, adapted = adapt(steps, columns, lora_rank, half) if on_gpu and lora_rank else (None, {})
    if on_gpu and lora_rank and slots is None:
        raise BuildError(
            f"max_lora_rank is {lora_rank}, and no product of the program for {target} takes LoRA adapters: "
            "they are all of plugins, or of inputs that a recipe has scaled; leave it out"
        )
    steps.finish([name for name, _, _ in results])
    planned = steps.plan(largest_counts(limits, vocab_size, context.prefill_tile))
    sources = weights.finish()
    launches = LaunchTable(steps, weights)
    resolved = [
        Step(
            kernel=call.kernel,
            inputs=list(call.inputs),
            weights=[weights.name_of(use) for use in call.weights],
            outputs=list(call.outputs),
            attrs=dict(call.attrs),
            launches=launches.of(call, call.launches),
            modules=mine,
        )
        for call, mine in zip(steps.calls, columns, strict=True)
    ]
    for number, one in adapted.items():
        own = launches.of(steps.calls[number], one.launches)
        resolved[number] = resolved[number].model_copy(update={"adapted": own, "adapter": one.place})
    program = Program(
        format=PROGRAM_FORMAT,
        target=target,
        vocab_size=vocab_size,
        limits=limits,
        arena_bytes=planned.arena_bytes,
        values=planned.values,
        weights=[source.weight for source in sources.values()],
        steps=resolved[:first_of_sampling],
        sampling=resolved[first_of_sampling:first_of_feeding],
        feeding=resolved[first_of_feeding:],
        kv_layers=layers,
        prefill_tile=context.prefill_tile,
        adapters=slots,
    )
    memory = memory_plan(program)
    return Lowered(program, sources, memory, chooser.decisions, launches.requests)


def _vocab_size(steps: StepList) -> int:
    shape = steps.placed(names.LOGITS).shape
    if len(shape) == 2 and shape[0] == names.ROWS and isinstance(shape[1], int):
        return shape[1]
    raise BuildError(f"the graph's logits have shape {list(shape)}; expected [N, vocab]")


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


def _kv_layers(ops: Sequence[Op], dtype: CacheDType, limits: Limits) -> list[KvLayer]:
    layers: dict[int, KvLayer] = {}
    windows = _windows(ops, limits)
    for op in ops:
        if op.kind in ("castiron.WriteKV", "castiron.RopeWriteKV"):
            sizes = {name: int(op.attrs[name]) for name in ("kv_heads", "head_dim", "v_head_dim")}
            stored = _CACHE_DTYPES.get(op.attrs.get("kv_format", ""), dtype)
            scales = {name: list(op.attrs.get(name, ())) for name in ("k_scale", "v_scale")}
            layer = int(op.attrs["layer"])
            layers[layer] = KvLayer.model_validate(
                {**sizes, **scales, "dtype": stored, "window": windows.get(layer, 0)}
            )
    if sorted(layers) != list(range(len(layers))):
        raise BuildError(f"cache layers are {sorted(layers)}; expected them numbered from 0 without gaps")
    return [layers[index] for index in range(len(layers))]


def _windows(ops: Sequence[Op], limits: Limits) -> dict[int, int]:
    """How far back layers with a window are read, where other layers are read further than any of them; of
    a model whose every layer has one, whole blocks are given back instead (cpp/program/sliding_window.h).
    """
    windows: dict[int, int] = {}
    everything = False
    for op in ops:
        if op.kind != "castiron.PagedAttention":
            continue
        sizes = [int(op.attrs.get(name, 0)) for name in ("window", "chunk")]
        window = min((size for size in sizes if size), default=0)
        if 0 < window < limits.max_seq_len:
            windows[int(op.attrs["layer"])] = window
        else:
            everything = True
    return windows if everything else {}
