"""Engines on the virtual device: builds without a compiler, and what a test process needs to run one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from castiron.build.kernels import compile as kernels
from castiron.build.kernels.job import PTX_CAPABILITY, Compiled, CudaJob, TritonJob
from castiron.engines import open_engine
from castiron.plugins.sdk import load_plugin
from synthetic_cubin import synthetic_cubin, synthetic_ptx
from virtual_cpp import cuda_kernels
from virtual_driver import VirtualDriver
from virtual_interpreter import Interpreter

#: Its 21 rows go through tiles, the decoded ones behind them through the streaming kernels.
PROMPT = [5, 9, 77, 30, 22, 140, 9, 3, 60, 61, 62, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
_SIZES = {"i32": 4, "fp32": 4, "i64": 8}


class VirtualGpu:
    """The virtual device of this process with the kernels of an engine.

    ``plugins``: the files that the engine was built with.

    Attributes:
        driver: faults, counters, injected failures.
        interpreter: counts launches by kernel.
    """

    def __init__(
        self, engine_dir: Path, compute_capability: int = 90, plugins: Sequence[Path] = (), **options: int
    ) -> None:
        self.driver = VirtualDriver(compute_capability, **options)
        self.interpreter = Interpreter(self.driver)
        engine, loaded = open_engine(engine_dir), [load_plugin(file) for file in plugins]
        for target in engine.targets:
            if target != "host":
                emulated = cuda_kernels(engine, target, loaded) if loaded else {}
                images = engine.kernel_images(target)
                self.interpreter.add_program(engine.program(target), images, emulated)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Builds inside give their kernels images without machine code, and leave the user's cache alone."""

    def compile_all(jobs: Sequence[tuple[Any, str]], done: Callable[[int, Compiled], None]) -> None:
        for index, (job, label) in enumerate(jobs):
            done(index, _compiled(job, label))

    class NoCache:
        def get(self, key: str) -> None:
            return None

        def put(self, key: str, compiled: Compiled) -> None:
            pass

    with (
        mock.patch.object(kernels, "compile_all", compile_all),
        mock.patch.object(kernels, "KernelCache", NoCache),
        mock.patch.object(kernels, "_inspected", iter),
    ):
        yield


def _compiled(job: TritonJob | CudaJob, label: str) -> Compiled:
    assert isinstance(job, TritonJob), f"{label}: only Triton kernels are made without a compiler"
    function = job.function.rpartition(".")[2]
    sizes = [_SIZES.get(kind, 8) for _, kind in job.types] + [8, 8]
    threads = 32 * job.num_warps
    tag = repr((job, label))
    ptx = b""
    if job.compute_capability == PTX_CAPABILITY:
        ptx = synthetic_ptx(function, sizes, job.compute_capability, threads, tag)
    resources = {"static_shared_bytes": 0, "spills": 0, "registers": 32, "matrix_instructions": 1}
    return Compiled(
        function=function,
        cubin=synthetic_cubin(function, sizes, job.compute_capability, threads, tag),
        ptx=ptx,
        threads=threads,
        shared_bytes=0,
        hidden_pointers=2,
        scratch_bytes=0,
        has_dot=False,
        resources=resources,
    )
