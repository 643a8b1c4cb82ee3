"""One Triton kernel to machine code or PTX, in a worker."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from types import ModuleType
from typing import Any

from . import sass
from .job import PTX_VERSION, Compiled, CompileError, TritonJob


def compile_triton(job: TritonJob) -> Compiled:
    """Compile. Raises CompileError with Triton's or ptxas' words."""
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    function = _function(job)
    types, constants = dict(job.types), dict(job.constants)
    names: list[str] = function.arg_names
    if set(names) != {*types, *constants}:
        raise CompileError(
            f"its parameters are {', '.join(names)}; the tactic gives {', '.join([*types, *constants])}"
        )
    if [name for name in names if name in types] != list(types):
        raise CompileError("the tactic gives its run-time parameters in another order than the function")
    source = ASTSource(
        function,
        {name: types.get(name, "constexpr") for name in names},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in job.aligned},
    )
    options: dict[str, Any] = {
        "num_warps": job.num_warps,
        "num_stages": job.num_stages,
        # Triton's default is about to change, and it changes numbers.
        "enable_fp_fusion": True,
    }
    if job.ptx_only:
        options["ptx_version"] = PTX_VERSION
    try:
        compiled = triton.compile(source, GPUTarget("cuda", job.compute_capability, 32), options)
    except Exception as error:  # whatever a user's kernel makes of the compiler is an answer, not a crash
        raise CompileError(f"{type(error).__name__}: {error}") from error
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    if getattr(metadata, "num_ctas", 1) != 1:
        raise CompileError(f"it wants clusters of {metadata.num_ctas} blocks; castiron launches single ones")
    cubin = compiled.asm["cubin"]
    return Compiled(
        function=metadata.name,
        cubin=cubin,
        ptx=ptx.encode() if job.ptx_only else b"",
        threads=32 * metadata.num_warps,
        shared_bytes=metadata.shared,
        hidden_pointers=_parameters(ptx) - len(types),
        scratch_bytes=metadata.global_scratch_size,
        has_dot="tt.dot" in compiled.asm["ttir"],
        resources={
            **sass.usage(cubin, metadata.name, job.compute_capability),
            "cuda_major": _cuda_major(job.compute_capability),
        },
    )


def _cuda_major(compute_capability: int) -> int:
    """The CUDA version of the assembler that Triton takes: drivers of an older major refuse its code."""
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if compute_capability >= 100 else knobs.nvidia.ptxas
    return int(str(tool.version).split(".")[0])


def _parameters(ptx: str) -> int:
    """Parameters of the one entry function."""
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)
    return 0 if entry is None else entry.group(1).count(".param")


def _function(job: TritonJob) -> Any:
    module = _load(job.module, job.file) if job.file else importlib.import_module(job.module)
    found: Any = module
    for part in job.function.split("."):
        found = getattr(found, part)
    return found


def _load(name: str, file: str) -> ModuleType:
    """A plugin's module, from its file, once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise CompileError(f"{file} cannot be loaded as a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
