"""The program: what a target executes. Written by ``build``, checked by the reader, run by ``cpp/program``.

A program is a list of steps over *values* that live in one planned arena, plus read-only *weights*.
Sizes may name two symbols that are known only when a step runs:

``T``  tokens in the step (all requests packed one after the other), at most ``max_num_tokens``
``N``  rows whose logits are wanted, at most ``max_logit_rows``
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

#: program.json's format. Same major: readable; a higher minor or another major: refused (see reader).
PROGRAM_FORMAT = (1, 6)

#: Counts that are known only when a step runs. Host programs use T and N; docs/cuda-program.md has the rest.
Symbol = Literal["T", "N", "S", "D", "P", "R", "E", "L", "V", "A", "B"]
Dim = Annotated[int, Field(ge=1, le=1 << 40)] | Symbol
#: Activations of one byte are temporaries of CUDA programs: rounded operands of products and their scales.
DType = Literal["f32", "i32", "bf16", "f16", "i8", "u8", "f8e4m3"]
#: i4 and f4e2m1 are codes of four bits, two in a byte.
WeightDType = Literal["f32", "bf16", "f16", "i8", "u8", "f8e4m3", "i4", "f4e2m1", "i32"]
CacheDType = Literal["f32", "bf16", "f16", "i8", "f8e4m3"]
#: Bytes of an element of an activation or of the cache.
ITEM_BYTES: Mapping[str, int] = {
    "f32": 4,
    "i32": 4,
    "bf16": 2,
    "f16": 2,
    "i8": 1,
    "u8": 1,
    "f8e4m3": 1,
}
#: Tokens in a block of the KV cache.
BLOCK_TOKENS = 32
#: How a weight lies in memory. K: input features, N: output features; both zero-padded up.
#: plain        row-major, ``shape`` as given
#: words        i4 or f4e2m1 [N][ceil(K/R)][R/2], runs of R = 32 (i4) or 16 inputs as R/8 little-endian 32-bit
#:              words: half byte h of word j is input (h % 4)·R/4 + 2j + h/4 of the run, so that one mask and
#:              shift of a word gives a pair of neighbours in 16 bits each
#: panel16      f32 or f16 [ceil(N/16)][K][16]
#: panel16x2    bf16 [ceil(N/16)][ceil(K/2)][16][2]: a pair of inputs side by side for each of 16 outputs
#: panel16x4    i8 or f8e4m3 [ceil(N/16)][ceil(K/4)][16][4]
#: panel16x4n   i4 or f4e2m1 [ceil(N/16)][ceil(K/4)][32]: the low half of byte j is of output j / 4 and input
#:              j % 4, the high half of output 8 + j / 4.
#: An i4 half byte is the code plus 8. Inputs and outputs behind the last are codes of 0.
Layout = Literal["plain", "words", "panel16", "panel16x2", "panel16x4", "panel16x4n"]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Count = Annotated[int, Field(ge=0, le=1 << 48)]
Attr = bool | int | float | str | list[int] | list[float]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Value(_Model):
    """An activation. ``offset`` is in bytes from the arena's start and 64-byte aligned unless it is a view.

    A view names its ``base`` value and then starts ``column`` elements into each of the base's rows: both are
    two-dimensional, and the row stride is the base's. ``token_ids``, ``positions`` (i32 [T]) and
    ``logit_rows`` (i32 [N]) are filled by the scheduler; the value named ``logits`` (f32 [N, vocab]) is read.
    """

    name: Name
    dtype: DType
    shape: Annotated[list[Dim], Field(min_length=1, max_length=6)]
    offset: Count = 0
    base: Name | None = None
    column: Count = 0


class Weight(_Model):
    """A read-only tensor: an entry of rank0.safetensors under the same name.

    ``shape`` is the logical one ([N, K] for matrices), the stored one follows from ``layout``.
    """

    name: Name
    dtype: WeightDType
    layout: Layout
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 40)]], Field(min_length=1, max_length=6)]


class GridDim(_Model):
    """``times * ceil(of / per)`` blocks, at most ``per_sm`` for each multiprocessor (0: no bound)."""

    of: Symbol | None = None
    per: Annotated[int, Field(ge=1, le=1 << 31)] = 1
    times: Annotated[int, Field(ge=1, le=1 << 31)] = 1
    per_sm: Annotated[int, Field(ge=0, le=64)] = 0


#: Arrays of the step's input block (docs/cuda-program.md, "Step inputs").
StepInput = Literal[
    "token_ids",
    "positions",
    "logit_rows",
    "slots",
    "query_start",
    "kv_len",
    "block_table",
    "decode_seq",
    "tile_seq",
    "tile_row",
    "window_slots",
    "window_table",
    "lora_rows",
    "lora_slots",
    "logit_lora_rows",
    "logit_lora_slots",
    "token_source",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "uniform",
    "num_logprobs",
    "repetition",
    "frequency",
    "presence",
    "edit_row",
    "edit_token",
    "edit_count",
]


class Arg(_Model):
    """One kernel argument: exactly one field is set."""

    value: Name | None = None
    weight: Name | None = None
    adapter: Count | None = None
    input: StepInput | None = None
    k_cache: Annotated[int, Field(ge=0, le=4096)] | None = None
    v_cache: Annotated[int, Field(ge=0, le=4096)] | None = None
    size: Symbol | None = None
    i32: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    i64: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    f32: float | None = None


class When(_Model):
    """A launch's condition: ``low <= of <= high``."""

    of: Symbol
    low: Annotated[int, Field(ge=0, le=1 << 31)]
    high: Annotated[int, Field(ge=0, le=1 << 31)]


class Launch(_Model):
    """One launch of ``Program.kernels[kernel]``."""

    kernel: Annotated[int, Field(ge=0, le=1 << 20)]
    grid: Annotated[list[GridDim], Field(min_length=1, max_length=3)]
    args: Annotated[list[Arg], Field(max_length=64)]
    when: When | None = None


class Kernel(_Model):
    """A compiled kernel of a CUDA target (docs/cuda-program.md, "Kernels")."""

    name: Name
    function: Annotated[str, Field(pattern=r"^[A-Za-z_$][A-Za-z0-9_$.]{0,511}$")]
    image: str = ""
    ptx: str = ""
    threads: Annotated[int, Field(ge=1, le=1024)]
    shared_bytes: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    params: Annotated[list[Literal["ptr", "i32", "i64", "f32"]], Field(max_length=64)]
    #: Triton types of the params ("*bf16", "i32", "fp32"); empty for a kernel that is not Triton's.
    types: Annotated[list[Annotated[str, Field(max_length=32)]], Field(max_length=64)] = []
    hidden_pointers: Annotated[int, Field(ge=0, le=8)] = 0
    #: Bytes of scratch for each block, to which hidden pointer 0 points then.
    scratch_bytes: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    source: str = ""
    constants: dict[Name, Attr] = {}
    resources: dict[Name, Attr] = {}


class ModuleColumns(_Model):
    """Columns [column, column + count) of a product are outputs [row, row + count) of ``module``.

    ``module`` is a path in the source model. A gated product has the columns of gate, then those of up.
    """

    module: Name
    column: Annotated[int, Field(ge=0, le=1 << 40)]
    row: Annotated[int, Field(ge=0, le=1 << 40)]
    count: Annotated[int, Field(ge=1, le=1 << 40)]


class AdapterPlace(_Model):
    """Where the adapters of a product lie in a slot (docs/cuda-program.md, "Adapters"): byte offsets of a
    [modules · rank, inputs] and of b [columns, rank], both in the type of ``AdapterSlots``.

    ``operands``: values that the step's ``adapted`` use beside its inputs and outputs.
    """

    inputs: Annotated[int, Field(ge=1, le=1 << 24)]
    a: Count
    b: Count
    operands: list[Name] = []


class Step(_Model):
    """One op. Operand meaning and attributes by kernel: docs/program.md; on CUDA ``launches`` compute it.

    ``modules``: of a product, the modules of the source model that adapters (LoRA) can add to. On CUDA
    ``adapted`` stand in the place of ``launches`` in a step in which rows have adapters, and ``adapter`` says
    where those are.
    """

    kernel: Name
    inputs: list[Name] = []
    weights: list[Name] = []
    outputs: list[Name] = []
    attrs: dict[Name, Attr] = {}
    launches: list[Launch] = []
    modules: list[ModuleColumns] = []
    adapted: list[Launch] = []
    adapter: AdapterPlace | None = None


class KvLayer(_Model):
    """One cache layer: what ``write_kv`` stores and ``paged_attention`` reads under one ``layer`` index."""

    kv_heads: Annotated[int, Field(ge=1, le=4096)]
    head_dim: Annotated[int, Field(ge=1, le=4096)]
    v_head_dim: Annotated[int, Field(ge=1, le=4096)]
    dtype: CacheDType
    #: One for each KV head, or none: a stored number is the value divided by its head's scale.
    k_scale: Annotated[list[Annotated[float, Field(gt=0)]], Field(max_length=4096)] = []
    v_scale: Annotated[list[Annotated[float, Field(gt=0)]], Field(max_length=4096)] = []
    #: Tokens that a query sees in this layer at most, itself among them, of a model of which other layers see
    #: more: it has blocks of its own then (window blocks). 0: its blocks are those of all others.
    window: Annotated[int, Field(ge=0, le=1 << 24)] = 0


class AdapterSlots(_Model):
    """Slots of device memory that adapters are copied to, one after the other; how many, the runtime says."""

    #: Of any module of an adapter, at most; a multiple of 16.
    rank: Annotated[int, Field(ge=16, le=512, multiple_of=16)]
    dtype: Literal["bf16", "f16"]
    slot_bytes: Annotated[int, Field(ge=1, le=1 << 40)]


class Limits(_Model):
    """What a program was planned for. Never exceeded at run time; a runtime may choose less, never more."""

    max_batch_size: Annotated[int, Field(ge=1, le=65536)]
    max_num_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    max_logit_rows: Annotated[int, Field(ge=1, le=1 << 20)]
    max_seq_len: Annotated[int, Field(ge=1, le=1 << 24)]


class Program(_Model):
    """A whole model on one target."""

    format: tuple[int, int]
    target: Name
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)]
    limits: Limits
    arena_bytes: Count
    values: list[Value]
    weights: list[Weight]
    steps: list[Step]
    kv_layers: list[KvLayer]
    #: CUDA targets only.
    kernels: list[Kernel] = []
    #: Rows of a query tile, the unit of symbol P; 0 on host.
    prefill_tile: Annotated[int, Field(ge=0, le=1024)] = 0
    #: Run behind ``steps`` when the device samples, filling ``sampled``; empty: the host samples.
    sampling: list[Step] = []
    #: Run ahead of ``steps`` where tokens come from ``sampled`` of the step before; empty: they never do.
    feeding: list[Step] = []
    #: Of a CUDA program that takes adapters.
    adapters: AdapterSlots | None = None

    def to_json(self) -> bytes:
        """What program.json holds."""
        return self.model_dump_json(exclude_defaults=True).encode()


def module_sizes(program: Program) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the modules that adapters can add to, by their paths in the source model."""
    widths = {value.name: value.shape[-1] for value in program.values}
    sizes: dict[str, tuple[int, int]] = {}
    for step in program.steps:
        for one in step.modules:
            _, outputs = sizes.get(one.module, (0, 0))
            inputs = int(widths[step.inputs[0]]) if step.adapter is None else step.adapter.inputs
            sizes[one.module] = (inputs, max(outputs, one.row + one.count))
    return sizes
