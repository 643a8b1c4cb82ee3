"""CUDA C++ kernels compiled for the CPU: the source as it is, behind a header that gives it threads."""

from __future__ import annotations

import re
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
    """A shared library whose ``castiron_run_launch(grid, threads, shared_bytes, params)`` runs a launch.

    Raises BuildError with the compiler's words for a source that uses more of CUDA than the header has.
    """
    source = _INCLUDE.sub("", kernel.source)
    source = _DYNAMIC.sub(r"\1* \2 = static_cast<\1*>(castiron_trial::dynamic_shared());", source)
    text = "\n".join(
        (
            f'#include "{_HEADER}"',
            f'#line 1 "{kernel.origin or "plugin source"}"',
            source,
            'extern "C" void castiron_run_launch(const unsigned* grid, const unsigned* threads, '
            "unsigned shared, void** params) {",
            f"    castiron_trial::launch(&{kernel.function}, grid, threads, shared, params);",
            "}",
        )
    )
    options = ("-Wno-unknown-pragmas", "-Wno-unused", "-O1")
    return compile_native(HostKernel(text, kernel.function, options, kernel.origin))
