"""Triton kernels to machine code and PTX, in a worker."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from . import sass
from .job import PTX_CAPABILITY, PTX_VERSION, Compiled, CompileError, TritonJob


class TritonCompiler:
    """Compiles one kernel after the other.

    It keeps the last one's PTX, for the case that a related architecture (``TritonJob.ptx_capability``) comes
    next: nine tenths of the time go before the assembler.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[object, ...], _Code] | None = None

    def compile(self, job: TritonJob) -> Compiled:
        """Raises CompileError with Triton's or ptxas' words."""
        source = _source(job)
        try:
            code, cubin = self._compile(job, source)
        except Exception as error:  # whatever a user's kernel makes of the compiler is an answer, not a crash
            raise CompileError(f"{type(error).__name__}: {error}") from error
        return Compiled(
            function=code.metadata["name"],
            cubin=cubin,
            ptx=code.ptx.encode() if job.compute_capability == PTX_CAPABILITY else b"",
            threads=32 * code.metadata["num_warps"],
            shared_bytes=code.metadata["shared"],
            hidden_pointers=_parameters(code.ptx) - len(job.types),
            scratch_bytes=code.metadata["global_scratch_size"],
            has_dot=code.has_dot,
            resources={
                **sass.usage(cubin, code.metadata["name"], job.compute_capability),
                "cuda_major": _cuda_major(job.compute_capability),
            },
        )

    def _compile(self, job: TritonJob, source: Any) -> tuple[_Code, bytes]:
        """What ``triton.compile`` does, one stage at a time, without its files in between."""
        from triton._C.libtriton import ir  # type: ignore[import-untyped]
        from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
        from triton.compiler.compiler import make_backend  # type: ignore[import-untyped]

        target = GPUTarget("cuda", job.compute_capability, 32)
        backend = make_backend(target)
        options = backend.parse_options(_options(job))
        stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
        backend.add_stages(stages, options, source.language)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        metadata = dict(vars(options))
        module = source.make_ir(target, options, codegen, modules, context)
        module = stages["ttir"](module, metadata)
        ttir = module.str_nodebug()
        capability = job.compute_capability if "f8" in ttir else job.ptx_capability
        key = (capability, job.num_warps, job.num_stages, ttir)
        if self._last is None or self._last[0] != key:
            for stage in ("ttgir", "llir", "ptx"):
                module = stages[stage](module, metadata)
            self._last = key, _Code(module, metadata, has_dot="tt.dot" in ttir)
        code = self._last[1]
        ptx = re.sub(r"\.target sm_\d+", f".target sm_{job.compute_capability}", code.ptx, count=1)
        return code, stages["cubin"](ptx, metadata)


@dataclass(frozen=True)
class _Code:
    """A kernel before the assembler. ``metadata``: what Triton's stages tell about it."""

    ptx: str
    metadata: dict[str, Any]
    has_dot: bool


def _source(job: TritonJob) -> Any:
    """Triton's description of the kernel. Raises CompileError where function and tactic do not agree."""
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
    return ASTSource(
        function,
        {name: types.get(name, "constexpr") for name in names},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in job.aligned},
    )


def _options(job: TritonJob) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_warps": job.num_warps,
        "num_stages": job.num_stages,
        # Triton's default is about to change, and it changes numbers.
        "enable_fp_fusion": True,
    }
    if job.compute_capability == PTX_CAPABILITY:
        options["ptx_version"] = PTX_VERSION
    return options


def _cuda_major(compute_capability: int) -> int:
    """The CUDA version of the assembler that Triton takes: drivers of an older major refuse its code."""
    from triton import knobs  # type: ignore[import-untyped]

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
