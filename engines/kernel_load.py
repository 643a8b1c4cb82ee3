"""How often a step launches each kernel of a CUDA program, and what that moves and computes at least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .program import ITEM_BYTES, Dim, Launch, Program, Step
from .weights_file import layout_bytes

#: Steps that read rows of a table, not the whole of it.
_BY_ROW = frozenset(("embedding", "gather", "rope", "rope_write_kv"))


@dataclass(frozen=True)
class Load:
    """What a kernel does in one step of the program: launches, bytes moved, matrix FLOPs."""

    launches: int = 0
    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(self.launches + other.launches, self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Occasion:
    """A step to estimate.

    Attributes:
        tokens: of the step, all of one sequence.
        context: tokens in the cache when the step is done.
        prefill_tile: of the program.
    """

    tokens: int
    context: int
    prefill_tile: int

    @property
    def counts(self) -> Mapping[str, int]:
        """The symbols: one row decodes, several are a prefill chunk; one row of logits, greedy."""
        decodes = self.tokens == 1
        tiles = 0 if decodes else -(-self.tokens // max(1, self.prefill_tile))
        rows = {"T": self.tokens, "N": 1, "S": 1, "D": int(decodes), "P": tiles}
        return rows | {"R": 0, "E": 0, "L": 0, "V": 1}


def kernel_loads(program: Program, occasion: Occasion) -> list[Load]:
    """Loads by kernel index, of the steps and of sampling.

    A step's bytes (operands once, of a cache what attention reads) and FLOPs are counted for the first of
    its launches that happens: those behind it finish its partial results.
    """
    loads = [Load() for _ in program.kernels]
    for step in (*program.steps, *program.sampling, *program.feeding):
        happening = [launch for launch in step.launches if _happens(launch, occasion.counts)]
        for position, launch in enumerate(happening):
            work = Load(1, *_work(program, step, occasion)) if position == 0 else Load(1)
            loads[launch.kernel] += work
    return loads


def _happens(launch: Launch, counts: Mapping[str, int]) -> bool:
    when = launch.when
    if when is not None and not when.low <= counts[when.of] <= when.high:
        return False
    return all(dim.of is None or counts[dim.of] > 0 for dim in launch.grid)


def _work(program: Program, step: Step, occasion: Occasion) -> tuple[float, float]:
    """Bytes and FLOPs of a step."""
    counts = occasion.counts
    values = {value.name: value for value in program.values}
    moved = flops = 0.0
    operands = [values[name] for name in (*step.inputs, *step.outputs)]
    for value in operands:
        moved += ITEM_BYTES[value.dtype] * _elements(value.shape, counts)
    weights = {weight.name: weight for weight in program.weights}
    rows = _elements(operands[0].shape[:1], counts) if operands else 0
    for name in step.weights:
        weight = weights[name]
        size = float(layout_bytes(weight))
        if step.kernel in _BY_ROW:
            size = min(size, rows * size / weight.shape[0])
        elif len(weight.shape) == 2:
            flops += 2.0 * rows * weight.shape[0] * weight.shape[1]
        moved += size
    layers = {arg.k_cache for launch in step.launches for arg in launch.args if arg.k_cache is not None}
    heads = step.attrs.get("q_heads")
    if step.kernel == "paged_attention" and isinstance(heads, int):
        for layer in (program.kv_layers[index] for index in layers):
            width = layer.head_dim + layer.v_head_dim
            moved += occasion.context * layer.kv_heads * width * ITEM_BYTES[layer.dtype]
            # A query sees what lies before it: all of the context less half of its own chunk.
            seen = occasion.context - (occasion.tokens - 1) / 2
            flops += 2.0 * occasion.tokens * seen * heads * width
    return moved, flops


def _elements(shape: list[Dim], counts: Mapping[str, int]) -> int:
    count = 1
    for dim in shape:
        count *= counts[dim] if isinstance(dim, str) else dim
    return count
