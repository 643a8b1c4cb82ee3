"""One CUDA C++ kernel to machine code or PTX by NVRTC, in a worker."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from . import sass
from .job import PTX_VERSION, Compiled, CompileError, CudaJob

_TIMEOUT = 300.0


def compile_cuda(job: CudaJob) -> Compiled:
    """Compile. Raises CompileError with the compiler's log."""
    if job.ptx_only:
        ptx = _lower_isa(_nvrtc(job, f"compute_{job.compute_capability}", "PTX"))
        cubin = _assemble(ptx, f"sm_{job.compute_capability}")
    else:
        # Machine code is for one architecture anyway: 'a' opens all of its instructions.
        suffix = "a" if job.compute_capability >= 90 else ""
        ptx, cubin = b"", _nvrtc(job, f"sm_{job.compute_capability}{suffix}", "CUBIN")
    return Compiled(
        function=job.function,
        cubin=cubin,
        ptx=ptx,
        threads=job.threads,
        shared_bytes=job.shared_bytes,
        hidden_pointers=0,
        scratch_bytes=0,
        has_dot=False,
        resources={
            **sass.usage(cubin, job.function, job.compute_capability),
            "cuda_major": _cuda_major(),
        },
    )


def _nvrtc(job: CudaJob, arch: str, form: str) -> bytes:
    from cuda.bindings import nvrtc  # type: ignore[import-untyped]

    def checked(answer: tuple[Any, ...]) -> Any:
        error, *rest = answer
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC answers {error.name}")
        return rest[0] if rest else None

    name = job.origin or f"{job.function}.cu"
    program = checked(nvrtc.nvrtcCreateProgram(job.source.encode(), name.encode(), 0, [], []))
    try:
        options = [option.encode() for option in (f"--gpu-architecture={arch}", "--std=c++17", *job.options)]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise CompileError(log.decode(errors="replace").strip("\0 \n") or error.name)
        size: int = checked(getattr(nvrtc, f"nvrtcGet{form}Size")(program))
        data = b" " * size
        checked(getattr(nvrtc, f"nvrtcGet{form}")(program, data))
        return data
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _cuda_major() -> int:
    """The CUDA version of NVRTC: drivers of an older major refuse its machine code."""
    from cuda.bindings import nvrtc

    return int(nvrtc.nvrtcVersion()[1])


def _lower_isa(ptx: bytes) -> bytes:
    """PTX under the version that the oldest supported driver knows; ptxas then tells if it holds more."""
    version = f".version {PTX_VERSION // 10}.{PTX_VERSION % 10}".encode()
    return re.sub(rb"\.version\s+\d+\.\d+", version, ptx.rstrip(b"\0"), count=1)


def _assemble(ptx: bytes, arch: str) -> bytes:
    from triton import knobs  # type: ignore[import-untyped]

    with tempfile.TemporaryDirectory(prefix="castiron-ptxas-") as folder:
        source, image = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_bytes(ptx)
        command = [knobs.nvidia.ptxas.path, f"-arch={arch}", str(source), "-o", str(image)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        if done.returncode != 0:
            raise CompileError(f"its PTX does not fit ISA {PTX_VERSION / 10}: {done.stderr.strip()}")
        return image.read_bytes()
