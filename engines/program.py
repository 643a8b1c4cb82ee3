"""The program: what a target executes. Written by ``build``, checked by the reader, run by ``cpp/program``.

A program is a list of steps over *values* that live in one planned arena, plus read-only *weights*.
Sizes may name two symbols that are known only when a step runs:

``T``  tokens in the step (all requests packed one after the other), at most ``max_num_tokens``
``N``  rows whose logits are wanted, at most ``max_logit_rows``
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

#: program.json's format. Same major: readable; a higher minor or another major: refused (see reader).
PROGRAM_FORMAT = (1, 0)

Dim = Annotated[int, Field(ge=1, le=1 << 40)] | Literal["T", "N"]
DType = Literal["f32", "i32"]
WeightDType = Literal["f32", "bf16"]
#: How a weight lies in memory. K: input features, N: output features; both zero-padded up.
#: plain        row-major, ``shape`` as given
#: panel16      f32  [ceil(N/16)][K][16]
#: panel16x2    bf16 [ceil(N/16)][ceil(K/2)][16][2]: a pair of inputs side by side for each of 16 outputs
Layout = Literal["plain", "panel16", "panel16x2"]
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


class Step(_Model):
    """One kernel call. Operand meaning and attributes by kernel: docs/program.md."""

    kernel: Name
    inputs: list[Name] = []
    weights: list[Name] = []
    outputs: list[Name] = []
    attrs: dict[Name, Attr] = {}


class KvLayer(_Model):
    """One cache layer: what ``write_kv`` stores and ``paged_attention`` reads under one ``layer`` index."""

    kv_heads: Annotated[int, Field(ge=1, le=4096)]
    head_dim: Annotated[int, Field(ge=1, le=4096)]
    v_head_dim: Annotated[int, Field(ge=1, le=4096)]
    dtype: WeightDType


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
