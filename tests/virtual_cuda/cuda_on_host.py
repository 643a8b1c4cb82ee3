"""Runs CUDA C++ kernels on this machine's CPU: the same source, compiled by g++ with cuda_on_host.h in front."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent / "cuda_on_host"
_FLAGS = ("-std=c++17", "-O1", "-g", "-fPIC", "-w", "-shared", "-fvisibility=hidden", "-ffp-contract=fast")
_TYPES = {"ptr": "void*", "i32": "int32_t", "i64": "int64_t", "f32": "float"}
_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?([\w:\s]+?)\s+(\w+)\s*\[\s*\]\s*;"
)


class HostKernelError(RuntimeError):
    """The kernel touched memory that is not mapped, or its threads wait for each other for ever."""


class CudaOnHost:
    """A ``__global__`` function of a CUDA C++ source as a function of this machine.

    Args:
        source: the translation unit, as NVRTC gets it.
        function: ``extern "C" __global__``.
        params: "ptr", "i32", "i64" or "f32" for each parameter.

    Raises RuntimeError with the compiler's text when g++ refuses the source.
    """

    def __init__(
        self, source: str, function: str, params: Sequence[str], options: Sequence[str] = ()
    ) -> None:
        self._function = function
        self._sizes = [4 if kind in ("i32", "f32") else 8 for kind in params]
        self._library = ctypes.CDLL(str(_compile(source, function, params, options)))

    def launch(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], params: Sequence[bytes]
    ) -> None:
        """Run all threads. ``params``: the raw bytes of each argument. Raises HostKernelError."""
        found = [len(raw) for raw in params]
        if found != self._sizes:
            raise HostKernelError(
                f"{self._function} has arguments of {self._sizes} bytes, launched with {found}"
            )
        buffers = [ctypes.create_string_buffer(raw, len(raw)) for raw in params]
        pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
        where = (ctypes.c_uint64 * 7)()
        call = ctypes.cast(self._library.cuda_on_host_call, ctypes.c_void_p)
        outcome = self._library.cuda_on_host_run(
            call, pointers, (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*block), where
        )
        place = f"block {tuple(where[1:4])}, thread {tuple(where[4:7])} of {self._function}"
        if outcome == 1:
            raise HostKernelError(f"illegal address 0x{where[0]:x} in {place}")
        if outcome == 2:
            raise HostKernelError(
                f"{self._function}: threads of block {tuple(where[1:4])} wait at a barrier that others never reach"
            )


def _compile(source: str, function: str, params: Sequence[str], options: Sequence[str]) -> Path:
    defines = [option for option in options if option.startswith("-D")]
    arguments = ", ".join(
        f"*static_cast<{_TYPES[kind]} const*>(params[{index}])" for index, kind in enumerate(params)
    )
    body = _DYNAMIC_SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(cuda_on_host::shared);", source)
    unit = (
        f'#include "cuda_on_host.h"\n#line 1 "{function}.cu"\n{body}\n'
        'extern "C" __attribute__((visibility("default"))) void cuda_on_host_call(const void* const* params) {\n'
        f"    cuda_on_host_invoke({function}, {arguments or ''});\n}}\n"
    )
    # Pointer parameters have types of their own: cast to what the function declares.
    helper = (
        "template <class... P, class... A> static void cuda_on_host_invoke(void (*kernel)(P...), A... given) "
        "{ kernel((P)given...); }\n"
    )
    unit = unit.replace('#line 1 "', helper + '#line 1 "', 1)
    digest = hashlib.sha256("\0".join([unit, *defines, *_sources()]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / "castiron-cuda-on-host"
    library = folder / f"{digest}.so"
    if library.exists():
        return library
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        file = Path(scratch) / "unit.cc"
        file.write_text(unit)
        target = Path(scratch) / "unit.so"
        command = [
            "g++",
            *_FLAGS,
            *defines,
            f"-I{_HERE}",
            str(file),
            str(_HERE / "fibers.cc"),
            "-o",
            str(target),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"g++ refuses {function}:\n{done.stderr}")
        target.replace(library)
    return library


def _sources() -> list[str]:
    return [path.read_text() for path in sorted(_HERE.iterdir())]
