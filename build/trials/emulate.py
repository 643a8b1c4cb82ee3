"""CUDA C++ kernels compiled for the CPU: the source as it is, behind a header that gives it threads."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...plugins.launch import CudaKernel, HostKernel
from ..kernels.native import compile_native

_HEADER: Final = Path(__file__).with_name("cuda_on_cpu.h")
#: Shared memory whose size the launch gives: a declaration that C++ has no word for.
_DYNAMIC: Final = re.compile(
    r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w:<> ]+?)\s+(\w+)\s*\[\s*\]\s*;"
)
_INCLUDE: Final = re.compile(
    r"^\s*#\s*include\s*<(?:cuda_runtime|cuda|device_launch_parameters)\.h>", re.MULTILINE
)


def emulated_library(kernel: CudaKernel) -> bytes:
    """A shared library for ``EmulatedKernel``.

    Raises BuildError with the compiler's words for a source that uses more of CUDA than the header has.
    """
    source = _INCLUDE.sub("", kernel.source)
    source = _DYNAMIC.sub(r"\1* \2 = static_cast<\1*>(castiron_trial::dynamic_shared());", source)
    text = "\n".join(
        (
            f'#include "{_HEADER}"',
            f'#line 1 "{kernel.origin or "plugin source"}"',
            source,
            'extern "C" bool castiron_run_launch(const unsigned* grid, const unsigned* threads, '
            "unsigned shared, void** params, castiron_trial::Fault* fault) {",
            f"    return castiron_trial::launch(&{kernel.function}, grid, threads, shared, params, fault);",
            "}",
        )
    )
    options = ("-Wno-unknown-pragmas", "-Wno-unused", "-O1")
    return compile_native(HostKernel(text, kernel.function, options, kernel.origin))


_Three = ctypes.c_uint * 3


class _Fault(ctypes.Structure):
    """castiron_trial::Fault of cuda_on_cpu.h."""

    _fields_ = (("address", ctypes.c_uint64), ("block", _Three), ("thread", _Three))


@dataclass(frozen=True)
class Fault:
    """A thread touched forbidden memory: at which address, and which thread of which block it was."""

    address: int
    block: tuple[int, ...]
    thread: tuple[int, ...]


class EmulatedKernel:
    """A CUDA C++ kernel in this process, from the file of its ``emulated_library``."""

    def __init__(self, library: str | Path) -> None:
        self._run = ctypes.CDLL(str(library)).castiron_run_launch
        self._run.restype = ctypes.c_bool

    def launch(
        self, grid: Sequence[int], block: Sequence[int], shared_bytes: int, params: Sequence[bytes]
    ) -> Fault | None:
        """Run a launch, one at a time in a process. ``params``: the bytes of each parameter, up to eight."""
        cells = (ctypes.c_uint64 * max(1, len(params)))(*(int.from_bytes(raw, "little") for raw in params))
        places = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cells) + 8 * i for i in range(len(cells))))
        fault = _Fault()
        if self._run(_Three(*grid), _Three(*block), shared_bytes, places, ctypes.byref(fault)):
            return Fault(fault.address, tuple(fault.block), tuple(fault.thread))
        return None
