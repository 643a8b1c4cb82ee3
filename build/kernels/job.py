"""What a worker is asked to compile and what it answers: plain data that crosses process boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

#: The PTX ISA of CUDA 12.0, whose drivers are the oldest that castiron supports.
PTX_VERSION: Final = 80
#: The architecture whose PTX goes along for all later ones. Triton kernels for it are compiled at
#: PTX_VERSION, beyond which it needs nothing: one compilation gives its machine code and that PTX.
PTX_CAPABILITY: Final = 80
#: Architectures for which Triton makes the PTX of another one, unless a kernel has 8-bit floats.
#: (86 does not have 80's: Triton keeps one of LLVM's passes from 80, and half of the kernels show it.)
PTX_OF: Final[Mapping[int, int]] = {89: 86}


@dataclass(frozen=True)
class TritonJob:
    """A Triton kernel for one architecture.

    Attributes:
        module, file, function: where the function is found; ``file`` is empty where ``module`` can be
            imported by name (a user's plugin is loaded from its file).
        types: (parameter, Triton type) of the run-time parameters, in order.
        constants: (parameter, value) of the ``tl.constexpr`` ones.
        aligned: parameters that are multiples of 16.
        compute_capability: ten times major plus minor.
    """

    module: str
    file: str
    function: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
    compute_capability: int

    @property
    def ptx_capability(self) -> int:
        """The architecture whose PTX this one can take, unless the kernel has 8-bit floats."""
        return PTX_OF.get(self.compute_capability, self.compute_capability)

    @property
    def relatives(self) -> str:
        """Equal for jobs that share most of their work: one worker should do them one after the other."""
        return repr(replace(self, compute_capability=self.ptx_capability))


@dataclass(frozen=True)
class CudaJob:
    """A kernel in CUDA C++ for one architecture; see ``plugins.launch.CudaKernel``.

    ``ptx_only``: PTX of an ISA that old drivers take is wanted; machine code serves inspection alone.
    """

    source: str
    function: str
    options: tuple[str, ...]
    threads: int
    shared_bytes: int
    origin: str
    compute_capability: int
    ptx_only: bool

    @property
    def relatives(self) -> str:
        """See ``TritonJob.relatives``; NVRTC starts anew for each architecture."""
        return repr(self)


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        function: entry point.
        cubin: machine code.
        ptx: the text at ``PTX_VERSION``; of Triton jobs for ``PTX_CAPABILITY`` and ``ptx_only`` ones alone.
        shared_bytes: dynamic shared memory.
        hidden_pointers: parameters behind the declared ones, all pointers, which get null.
        scratch_bytes: for each block, to which hidden pointer 0 points then (tensor descriptors).
        has_dot: the source asks for matrix products.
        resources: what the machine code uses (``sass.usage``, then ``sass.instruction_mix`` too), and
            "cuda_major", the CUDA version that made it.
    """

    function: str
    cubin: bytes
    ptx: bytes
    threads: int
    shared_bytes: int
    hidden_pointers: int
    scratch_bytes: int
    has_dot: bool
    resources: dict[str, Any] = field(default_factory=dict)


class CompileError(Exception):
    """A kernel does not compile; the text is the compiler's."""
