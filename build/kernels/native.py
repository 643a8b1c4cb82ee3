"""Plugins' kernels for the CPU: compiled by this machine's C++ compiler into a shared library."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from castiron.errors import BuildError

from ...plugins.launch import HostKernel

#: Headers that a plugin may include.
INCLUDE: Final = Path(__file__).resolve().parents[2] / "plugins" / "include"
#: The instruction set that every host engine may use (README): AVX2 with FMA.
_FLAGS: Final = (
    *("-shared", "-fPIC", "-O3", "-mavx2", "-mfma", "-std=c++20", "-Wall"),
    "-DCASTIRON_PLUGIN_SOURCE",
)
_SECONDS: Final = 300.0


def compile_native(kernel: HostKernel) -> bytes:
    """The shared library of a host kernel's source.

    Raises BuildError with the compiler's own words when it refuses the source, and when there is none.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="castiron-native-") as folder:
        source, library = Path(folder, "plugin.cc"), Path(folder, "plugin.so")
        # Messages name the plugin's file, not the temporary copy.
        source.write_text(f'#line 1 "{kernel.origin or "plugin source"}"\n{kernel.source}')
        command = [compiler, *_FLAGS, f"-I{INCLUDE}", *kernel.options, str(source), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{compiler} did not finish {_name(kernel)} within {_SECONDS:.0f} s") from None
        if done.returncode != 0:
            raise BuildError(f"{compiler} cannot compile {_name(kernel)}:\n{done.stderr.strip()}")
        return library.read_bytes()


def find_compiler() -> str:
    """The C++ compiler: $CXX, c++, g++ or clang++; raises BuildError when there is none."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("a plugin has a kernel in C++ and there is no compiler here; install g++, or set CXX")


def _name(kernel: HostKernel) -> str:
    return f"host kernel {kernel.function!r}" + (f" of {kernel.origin}" if kernel.origin else "")
