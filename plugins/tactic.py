"""What an op implementation is: plain data that lowering reads; the same for built-in and user tactics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ..engines.program import ITEM_BYTES, DType
from .launch import KernelLaunch
from .targets import Family, Target

if TYPE_CHECKING:
    from ..engines.cuda_layout import KvLayout
    from ..engines.program import Limits

#: The op that lowering adds by itself: input 0 (perhaps a column view) as a contiguous value, perhaps of
#: another shape of as many elements, perhaps of another dtype.
COPY = "castiron.Copy"
#: The op that lowering adds behind the graph where a target has a tactic for it: logits f32 [N, vocab] to
#: sampled i32 [N, 2], top ids i32 [N, 20], top log-probabilities f32 [N, 21] (docs/cuda-program.md).
SAMPLE = "castiron.Sample"
#: The op that lowering adds where a target samples and has a tactic for it: writes tokens of sampled i32
#: [N, 2] into the step input token_ids, where the step input token_source names a row.
FEED = "castiron.FeedSampled"

Dim = int | str
Dims = tuple[Dim, ...]
Attr = bool | int | float | str | list[int] | list[float]


@dataclass(frozen=True)
class Quant:
    """How a constant matrix [N, K] is quantized (docs/graph.md, "Quantized weights").

    ``format`` of the codes; ``group`` inputs share a scale, 0: the whole row; ``columns``: which input each
    column of codes multiplies, None: its own; ``scale_dtype``: what the scales are stored in.
    """

    format: Literal["int8", "int4", "fp8", "fp4"]
    group: int
    scale_dtype: Literal["f32", "f16"] = "f32"
    has_offset: bool = False
    columns: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Operand:
    """An operand or result of a graph op.

    ``constant``: a weight expression (checkpoint tensors, or numbers in the graph). ``values``: its numbers
    where they are inlined in the graph. ``quant``: set where the expression is a quantized matrix; a tactic
    that does not ask gets the numbers that the codes stand for.
    """

    name: str
    shape: Dims
    dtype: DType = "f32"
    constant: bool = False
    values: np.ndarray[Any, Any] | None = None
    quant: Quant | None = None

    @property
    def scalar(self) -> float | None:
        """The number, if this is an inlined constant of one element."""
        if self.values is None or self.values.size != 1:
            return None
        return float(self.values.reshape(-1)[0])


@dataclass(frozen=True)
class Op:
    """A node of the rewritten graph as a tactic sees it. ``kind`` is "castiron.Linear", "Add", ..."""

    kind: str
    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def input(self, index: int) -> Operand | None:
        """Operand ``index``, or None where it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def required(self, index: int) -> Operand:
        """Operand ``index``, which the op cannot lack."""
        operand = self.input(index)
        if operand is None:
            raise ValueError(f"{self.kind} lacks operand {index}")
        return operand


#: Parts of a quantized matrix.
QuantizedRole = Literal["codes", "scales", "offsets", "columns", "block_scales", "row_scales"]


@dataclass(frozen=True)
class WeightUse:
    """A weight as a kernel reads it.

    ``parts`` names one weight expression, or two that are interleaved by panels of 16 (gate, up).
    ``role``: "matrix" (build dtype; panels on host, plain on CUDA), "table" (build dtype, the layout is
    free), "plain" (build dtype, row-major on every target), "vector" (always float32, row-major). Of a
    quantized matrix (``Operand.quant``): "codes", "scales" and "offsets" (panels on host, row-major on CUDA,
    where gate's rows come before up's), "columns" (i32 [K]); "block_scales" (fp4 on CUDA:
    u8 [N, G], e4m3 where 16 inputs share a scale, else e8m0) and "row_scales" (f32 [N]), whose product the
    scales are. ``values``: a "vector" of numbers that the tactic itself makes, in the place of ``parts``.
    ``stacked``: so many matrices one below the other, each of which begins with a panel of its own.
    """

    parts: tuple[str, ...]
    role: Literal["matrix", "table", "plain", "vector"] | QuantizedRole
    values: tuple[float, ...] = ()
    stacked: int = 1


@dataclass(frozen=True)
class LoraPlace:
    """Where adapters of one product lie (docs/cuda-program.md, "Adapters").

    Attributes:
        rank: of each module, a multiple of 16.
        starts: the first column of each of the product's modules.
        a, b: byte offsets of its matrices in a slot.
        slot_bytes: from one slot to the next.
    """

    rank: int
    starts: tuple[int, ...]
    a: int
    b: int
    slot_bytes: int


@dataclass(frozen=True)
class Adapted:
    """How a call is computed in a step in which rows have adapters.

    ``launches`` stand in the place of the call's own; ``reads``: what they read beside the call's inputs;
    ``temporaries``: what they use beside its own.
    """

    launches: tuple[KernelLaunch, ...]
    reads: tuple[str, ...]
    temporaries: tuple[Operand, ...]


class Adaptable(Protocol):
    """A product that LoRA adapters can add to, on CUDA."""

    @property
    def inputs(self) -> int:
        """Of a row."""

    @property
    def columns(self) -> int:
        """Of all its matrices together: gate's, then up's."""

    def adapted(self, place: LoraPlace) -> Adapted:
        """Its launches with what the adapters add."""


@dataclass(frozen=True)
class Call:
    """One kernel call; becomes a Step.

    On host ``kernel`` is one of docs/program.md and says all; on CUDA it is a name for people and
    ``launches`` do the work. ``takes_views``: inputs may be column views of wider values. ``in_place``:
    pairs (output, input) that may share bytes when shapes agree and the input dies here. ``adaptable``: what
    adapters can add to, if they can.
    """

    kernel: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    weights: Sequence[WeightUse] = ()
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    launches: tuple[KernelLaunch, ...] = ()
    takes_views: bool = False
    in_place: tuple[tuple[int, int], ...] = ()
    adaptable: Adaptable | None = None


@dataclass(frozen=True)
class View:
    """``name`` holds data of ``base``.

    ``column`` None: the same numbers in another shape, a copy. Otherwise columns [column, column + width) of
    a two-dimensional base, without a copy.
    """

    name: str
    base: str
    shape: Dims
    column: int | None = None


@dataclass(frozen=True)
class Lowering:
    """What a tactic makes of an op: actions in order, and the values that only it uses."""

    actions: tuple[Call | View, ...]
    temporaries: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Context:
    """What a tactic may know besides its op.

    Attributes:
        half: the build's dtype of matrices, of values stored in half and of the cache ("f32" on host builds
            in float32).
        kv: where the cache's layers lie; None on host.
        prefill_tile: rows of a query tile (symbol P); 0 on host.
        activations: "auto" lets products of weights alone (``x_format`` "") round their x to int8 where that
            is faster; "full" forbids it.
    """

    target: Target
    half: Literal["f32", "bf16", "f16"]
    limits: Limits
    kv: KvLayout | None = None
    prefill_tile: int = 0
    activations: Literal["auto", "full"] = "auto"


@dataclass(frozen=True)
class Tactic:
    """One implementation of one op on one family of targets.

    ``accepts`` is the predicate over operands, attributes and target; ``lower`` gives the calls; ``cost``
    estimates seconds for ``tokens`` rows (tactics are ranked by it); ``reference`` computes the op on numpy
    arrays (inputs in order, absent ones as None) and tests the tactic.
    """

    name: str
    kind: str
    family: Family
    accepts: Callable[[Op, Context], bool]
    lower: Callable[[Op, Context], Lowering]
    cost: Callable[[Op, Context, int], float]
    reference: Callable[..., tuple[np.ndarray[Any, Any], ...]] | None = None


def element_count(shape: Dims, tokens: int) -> int:
    """Elements of a value for a step of ``tokens`` rows."""
    count = 1
    for dim in shape:
        count *= tokens if isinstance(dim, str) else dim
    return count


def bandwidth_cost(op: Op, context: Context, tokens: int) -> float:
    """Seconds to read every operand and write every result once: right for ops that do little arithmetic."""
    moved = sum(
        element_count(operand.shape, tokens) * ITEM_BYTES[operand.dtype]
        for operand in (*op.inputs, *op.outputs)
        if operand is not None
    )
    return moved / context.target.bandwidth
