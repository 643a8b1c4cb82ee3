"""What a CUDA tactic asks for: kernels to compile and launches of them; plain data that lowering resolves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..engines.program import StepInput, Symbol

ParamKind = Literal[
    "value", "row_stride", "weight", "adapter", "input", "k_cache", "v_cache", "size", "i32", "i64", "f32"
]


@dataclass(frozen=True)
class Param:
    """A launch argument: ``kind`` as in docs/cuda-program.md; ``of`` names it, or is the number.

    A weight is named by its index in the call's ``weights``. ``row_stride`` is an i32 that lowering puts in.
    """

    kind: ParamKind
    of: str | int | float


def value(name: str) -> Param:
    """The address of a value (of its first column, for a view)."""
    return Param("value", name)


def row_stride(name: str) -> Param:
    """Elements from one row of a two-dimensional value to the next: more than its width if it is a view."""
    return Param("row_stride", name)


def weight(index: int) -> Param:
    """The address of the call's weight ``index``."""
    return Param("weight", index)


def adapter(offset: int) -> Param:
    """The address of a byte of the first adapter slot."""
    return Param("adapter", offset)


def step_input(name: StepInput) -> Param:
    """The address of an array of the step's input block."""
    return Param("input", name)


def size(symbol: Symbol) -> Param:
    """A count of the step, as i32."""
    return Param("size", symbol)


@dataclass(frozen=True)
class Grid:
    """One grid dimension: ``times * ceil(of / per)``, at most ``per_sm`` blocks a multiprocessor if not 0."""

    of: Symbol | None = None
    per: int = 1
    times: int = 1
    per_sm: int = 0

    def blocks(self, counts: Mapping[str, int], multiprocessors: int) -> int:
        """How many blocks a step of these counts has."""
        blocks = self.times * (1 if self.of is None else -(-counts[self.of] // self.per))
        return min(blocks, self.per_sm * multiprocessors) if self.per_sm else blocks


@dataclass(frozen=True)
class When:
    """Launch only if ``low <= of <= high``."""

    of: Symbol
    low: int = 0
    high: int = 1 << 31


@dataclass(frozen=True)
class TritonKernel:
    """A Triton kernel with its specialisation.

    Attributes:
        function: the ``triton.jit`` function.
        types: Triton types of the run-time arguments by parameter name, in order ("*bf16", "i32", "fp32").
        constants: ``tl.constexpr`` parameters.
        aligned: parameters whose address or number is a multiple of 16 beyond those that lowering finds:
            it knows whole values, weights, inputs and caches to be, and computes it for views and constants.
        num_warps, num_stages: as in Triton.
        hot: one of the kernels that decide speed: spills and missing matrix instructions are errors.
    """

    function: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    aligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 3
    hot: bool = False


@dataclass(frozen=True)
class CudaKernel:
    """A kernel in CUDA C++, compiled by NVRTC.

    Attributes:
        source: the translation unit; ``function`` must be ``extern "C" __global__``.
        params: "ptr", "i32", "i64" or "f32" for each parameter.
        threads: of a block. shared_bytes: dynamic shared memory.
        options: further NVRTC options, such as "--use_fast_math".
    """

    source: str
    function: str
    params: tuple[Literal["ptr", "i32", "i64", "f32"], ...]
    threads: int = 256
    shared_bytes: int = 0
    options: tuple[str, ...] = ()
    origin: str = ""


@dataclass(frozen=True)
class HostKernel:
    """A kernel for the CPU in C++ (or C), compiled by the build machine's compiler.

    It has no arguments of its own: a host call hands every operand over (plugins/include/castiron_plugin.h).

    Attributes:
        source: the translation unit. function: its kernel, ``extern "C"``.
        options: further compiler options.
        origin: the file it comes from, for messages.
    """

    source: str
    function: str
    options: tuple[str, ...] = ()
    origin: str = ""


@dataclass(frozen=True)
class KernelLaunch:
    """One launch: arguments in the order of the kernel's run-time parameters."""

    kernel: TritonKernel | CudaKernel | HostKernel
    grid: tuple[Grid, ...]
    args: tuple[Param, ...]
    when: When | None = None
