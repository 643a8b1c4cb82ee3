"""From the kernels that lowered programs ask for to images in the engine, through the cache."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from typing import Any, cast

from castiron.errors import BuildError

from ...engines.program import Attr, Kernel
from ...plugins.launch import CudaKernel, HostKernel, TritonKernel
from ...plugins.targets import TARGETS, Target
from ..launches import KernelRequest, param_types
from ..lower import Lowered
from . import sass
from .cache import KernelCache, cache_key
from .job import Compiled, CudaJob, TritonJob
from .native import compile_native
from .occupancy import occupancy
from .pool import compile_all, cpus


@dataclass(frozen=True)
class _Task:
    """One kernel of one target."""

    target: Target
    number: int
    request: KernelRequest
    job: TritonJob | CudaJob
    key: str

    @property
    def label(self) -> str:
        """For messages: kernel, target and specialisation."""
        constants = getattr(self.request.kernel, "constants", {})
        shown = ", ".join(f"{name}={value}" for name, value in constants.items())
        return f"{self.request.label!r} for {self.target.name}" + (f" ({shown})" if shown else "")


@dataclass(frozen=True)
class CompiledKernels:
    """What compiling gave: programs with their kernels, images by entry of rank0.engine, the count of kernels
    that the cache already had, and what is wrong with hot ones.
    """

    lowered: list[Lowered]
    images: dict[str, bytes]
    total: int
    from_cache: int
    notes: tuple[str, ...]


def count_kernels(lowered: Sequence[Lowered]) -> int:
    """Kernels that ``compile_kernels`` will deal with."""
    return sum(len(one.requests) for one in lowered)


def compile_kernels(
    lowered: Sequence[Lowered], advance: Callable[[int], None], cache: KernelCache | None = None
) -> CompiledKernels:
    """Compile every kernel of every target, side by side.

    ``advance`` is told how many more are done. Raises BuildError naming kernel and target when one does not
    compile (with the compiler's words) or does not fit the target.
    """
    tasks = _tasks(lowered)
    found, from_cache = _compile_tasks(tasks, advance, cache or KernelCache())
    images: dict[str, bytes] = {}
    kernels: dict[tuple[str, int], Kernel] = {}
    notes: list[str] = []
    for task in tasks:
        compiled = found[task.key]
        kernels[task.target.name, task.number] = _kernel(task, compiled, images)
        if weakness := _weakness(task, compiled):
            notes.append(f"hot kernel {task.label}: {weakness}")
    finished = [_with_kernels(one, kernels, images, advance) for one in lowered]
    return CompiledKernels(finished, images, count_kernels(lowered), from_cache, tuple(notes))


def compile_requests(
    requests: Sequence[KernelRequest], target: Target, cache: KernelCache | None = None
) -> list[Compiled]:
    """Compile kernels for one CUDA target, outside of a build; raises BuildError as ``compile_kernels``."""
    tasks = [_task(target, number, request, _compilers()) for number, request in enumerate(requests)]
    found, _ = _compile_tasks(tasks, lambda _: None, cache or KernelCache())
    return [found[task.key] for task in tasks]


def _compile_tasks(
    tasks: Sequence[_Task], advance: Callable[[int], None], cache: KernelCache
) -> tuple[dict[str, Compiled], int]:
    """Compiled kernels by key, and how many tasks the cache served."""
    found: dict[str, Compiled] = {}
    missing: dict[str, _Task] = {}
    for task in tasks:
        known = found.get(task.key) or cache.get(task.key)
        if known is not None:
            found[task.key] = known
        else:
            missing.setdefault(task.key, task)
    # sm_80 and compute_80 may want one and the same.
    wanted = Counter(task.key for task in tasks if task.key in missing)
    from_cache = len(tasks) - wanted.total()
    advance(from_cache)
    todo = list(missing.values())

    fresh: list[tuple[_Task, Compiled]] = []

    def done(index: int, compiled: Compiled) -> None:
        fresh.append((todo[index], compiled))
        advance(wanted[todo[index].key])

    try:
        compile_all([(task.job, task.label) for task in todo], done)
    finally:  # what is compiled stays compiled, whatever ends this build
        for task, compiled in _inspected(fresh):
            cache.put(task.key, compiled)
            found[task.key] = compiled
    for task in tasks:
        _check(task, found[task.key])
    return found, from_cache


def _inspected(fresh: Sequence[tuple[_Task, Compiled]]) -> Iterator[tuple[_Task, Compiled]]:
    """The kernels with their instruction mix, read from the SASS in one run for each architecture."""
    groups: dict[int, list[tuple[_Task, Compiled]]] = {}
    for task, compiled in fresh:
        groups.setdefault(task.target.compute_capability, []).append((task, compiled))

    def mixes(capability: int) -> list[dict[str, Any]]:
        kernels = [(compiled.cubin, compiled.function) for _, compiled in groups[capability]]
        return sass.instruction_mixes(kernels, capability)

    with ThreadPoolExecutor(max(1, cpus())) as threads:
        for group, found in zip(groups.values(), threads.map(mixes, groups), strict=True):
            for (task, compiled), mix in zip(group, found, strict=True):
                yield task, replace(compiled, resources=compiled.resources | mix)


def _with_kernels(
    one: Lowered,
    compiled: Mapping[tuple[str, int], Kernel],
    images: dict[str, bytes],
    advance: Callable[[int], None],
) -> Lowered:
    target = one.program.target
    kernels = []
    for number, request in enumerate(one.requests):
        if isinstance(request.kernel, HostKernel):
            name = _name(request, number)
            image = f"{target}/kernels/{name}.so"
            images[image] = compile_native(request.kernel)
            origin = request.kernel.origin
            kernels.append(
                Kernel(
                    name=name,
                    function=request.kernel.function,
                    image=image,
                    threads=1,
                    params=[],
                    source=origin,
                )
            )
            advance(1)
        else:
            kernels.append(compiled[target, number])
    return replace(one, program=one.program.model_copy(update={"kernels": kernels}))


def _tasks(lowered: Sequence[Lowered]) -> list[_Task]:
    tasks = []
    compilers = ""
    for one in lowered:
        target = TARGETS[one.program.target]
        for number, request in enumerate(one.requests):
            if isinstance(request.kernel, HostKernel):
                continue
            compilers = compilers or _compilers()
            tasks.append(_task(target, number, request, compilers))
    return tasks


def _task(target: Target, number: int, request: KernelRequest, compilers: str) -> _Task:
    assert not isinstance(request.kernel, HostKernel)
    job, source_key = _job(request.kernel, target)
    return _Task(target, number, request, job, cache_key(job, source_key, compilers))


def _job(kernel: TritonKernel | CudaKernel, target: Target) -> tuple[TritonJob | CudaJob, str]:
    """The job and what identifies its source."""
    capability = target.compute_capability
    if isinstance(kernel, CudaKernel):
        job = CudaJob(
            kernel.source,
            kernel.function,
            kernel.options,
            kernel.threads,
            kernel.shared_bytes,
            kernel.origin,
            capability,
            target.ptx_only,
        )
        return job, ""
    function = kernel.function
    return (
        TritonJob(
            module=function.__module__,
            file=_file_of(function.__module__),
            function=function.fn.__qualname__,
            types=tuple(kernel.types.items()),
            constants=tuple(kernel.constants.items()),
            aligned=tuple(sorted(kernel.aligned)),
            num_warps=kernel.num_warps,
            num_stages=kernel.num_stages,
            compute_capability=capability,
        ),
        str(function.cache_key),
    )


def _file_of(module: str) -> str:
    """Where a worker must load ``module`` from; "" for one that any process can import by name."""
    # Not importlib.util.find_spec: it finds what is in sys.modules, as a loaded plugin file is.
    if module != "__main__" and PathFinder.find_spec(module.partition(".")[0]) is not None:
        return ""
    return getattr(sys.modules[module], "__file__", None) or ""


def _compilers() -> str:
    from importlib.metadata import PackageNotFoundError, version

    import triton  # type: ignore[import-untyped]
    from triton._C.libtriton import get_cache_invalidating_env_vars  # type: ignore[import-untyped]

    try:
        nvrtc = version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        nvrtc = "none"
    return f"triton {triton.__version__} {sorted(get_cache_invalidating_env_vars().items())} nvrtc {nvrtc}"


def _check(task: _Task, compiled: Compiled) -> None:
    used = compiled.resources
    shared = compiled.shared_bytes + used["static_shared_bytes"]
    if shared > task.target.shared_bytes:
        raise BuildError(
            f"kernel {task.label} needs {shared:,} bytes of shared memory; a block has at most "
            f"{task.target.shared_bytes:,} there. Its tactic must choose smaller tiles or fewer stages"
        )


def _weakness(task: _Task, compiled: Compiled) -> str:
    """What makes a hot kernel slow, or "". No reason to fail a build: slow is better than none."""
    kernel, used = task.request.kernel, compiled.resources
    if not isinstance(kernel, TritonKernel) or not kernel.hot:
        return ""
    if used["spills"]:
        return f"spills: {used['spills']} loads and stores of local memory"
    if compiled.has_dot and not used["matrix_instructions"]:
        return "multiplies matrices without matrix instructions"
    return ""


def _name(request: KernelRequest, number: int) -> str:
    """A name that is unique in the program and may name an entry of rank0.engine."""
    return f"{re.sub(r'[^a-z0-9_]', '_', request.label.lower()).strip('_') or 'kernel'}.{number}"


def _kernel(task: _Task, compiled: Compiled, images: dict[str, bytes]) -> Kernel:
    kernel = task.request.kernel
    name = _name(task.request, task.number)
    entry = f"{task.target.name}/kernels/{name}.{'ptx' if task.target.ptx_only else 'cubin'}"
    images[entry] = compiled.ptx if task.target.ptx_only else compiled.cubin
    shared = compiled.shared_bytes + compiled.resources["static_shared_bytes"]
    resources = {
        **compiled.resources,
        "occupancy": round(
            occupancy(task.target, compiled.resources["registers"], compiled.threads, shared), 4
        ),
    }
    if weakness := _weakness(task, compiled):
        resources["weakness"] = weakness
    is_triton = isinstance(kernel, TritonKernel)
    return Kernel(
        name=name,
        function=compiled.function,
        image="" if task.target.ptx_only else entry,
        ptx=entry if task.target.ptx_only else "",
        threads=compiled.threads,
        shared_bytes=compiled.shared_bytes,
        params=list(param_types(kernel)),
        types=list(kernel.types.values()) if isinstance(kernel, TritonKernel) else [],
        hidden_pointers=compiled.hidden_pointers,
        scratch_bytes=compiled.scratch_bytes,
        source=_source(kernel) if is_triton else getattr(kernel, "origin", ""),
        constants=_constants(task) if is_triton else {},
        resources=resources,
    )


def _source(kernel: Any) -> str:
    return f"{kernel.function.__module__}:{kernel.function.fn.__qualname__}"


def _constants(task: _Task) -> dict[str, Attr]:
    kernel = cast(TritonKernel, task.request.kernel)
    constants: dict[str, Attr] = {}
    for name, value in kernel.constants.items():
        if isinstance(value, tuple | list):
            value = list(value)
        elif not isinstance(value, bool | int | float | str):
            raise BuildError(
                f"kernel {task.label}: constant {name!r} is {value!r}; expected a number, a string, a truth "
                "value or a list of numbers"
            )
        constants[name] = value
    return constants
