"""What the child process of a trial is asked to run, and what it answers: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

#: A resolved argument: ("array", name, byte offset), ("i32" | "i64", number) or ("f32", number).
Argument = tuple[str, Any] | tuple[str, Any, int]


@dataclass(frozen=True)
class Memory:
    """A guarded buffer: its content before the run. ``writable``: an operand that the kernels may change."""

    content: np.ndarray[Any, Any]
    writable: bool


@dataclass(frozen=True)
class Tensor:
    """An operand of a native call: where it lies and its geometry."""

    memory: str
    dtype: Literal["f32", "i32", "bf16"]
    shape: tuple[int, ...]
    row_stride: int
    offset: int = 0


@dataclass(frozen=True)
class NativeRun:
    """A call of a host kernel: every part, one after the other."""

    library: str
    function: str
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parts: int


@dataclass(frozen=True)
class CudaRun:
    """A launch of a CUDA C++ kernel that was compiled for the CPU (``emulate``)."""

    library: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class TritonRun:
    """A launch of a Triton kernel in the interpreter; ``file`` is the plugin's."""

    file: str
    function: str
    grid: tuple[int, ...]
    types: Mapping[str, str]
    arguments: tuple[Argument, ...]
    constants: Mapping[str, Any]


@dataclass(frozen=True)
class TrialJob:
    """Buffers by name, the runs in order, and which buffers the caller wants back."""

    memory: Mapping[str, Memory]
    runs: tuple[NativeRun | CudaRun | TritonRun, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class TrialAnswer:
    """The buffers asked for; ``problem`` says what a kernel did that it must not."""

    results: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    problem: str = ""
