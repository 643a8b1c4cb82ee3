"""From a tactic's calls to a job for the child process, and its answer."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from castiron.errors import BuildError

from ...engines.cuda_layout import KvLayout
from ...plugins.launch import CudaKernel, HostKernel, KernelLaunch, Param, TritonKernel
from ...plugins.tactic import Call, Lowering, Op, Operand, WeightUse
from ..kernels.native import compile_native
from .cases import COUNTS, Case, bound
from .emulate import emulated_library
from .job import Argument, CudaRun, Memory, NativeRun, Tensor, TrialAnswer, TrialJob, TritonRun

Storage = Literal["f32", "bf16"]
_NUMPY = {"f32": np.dtype(np.float32), "i32": np.dtype(np.int32), "bf16": np.dtype(ml_dtypes.bfloat16)}
#: A column view starts this far into its base's rows, and the base goes on as far behind it.
_MARGIN = 16
#: Of the device that persistent kernels are counted for.
_MULTIPROCESSORS = 4
_SECONDS = 120.0
_POOL = "the KV cache"


def may_be_view(operand: Operand | None) -> bool:
    """Whether lowering may give a column view of a wider value for this operand."""
    return operand is not None and not operand.constant and len(operand.shape) == 2


@dataclass
class _Placement:
    """Where the values of a trial lie."""

    kv: KvLayout | None = None
    memory: dict[str, Memory] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def run_lowering(
    case: Case, op: Op, lowering: Lowering, file: Path, storage: Storage, *, views: bool = False
) -> TrialAnswer:
    """Run what a tactic made of the op, on operands in ``storage``; ``views``: matrices are column views."""
    place = _place(case, op, lowering, storage, views)
    with tempfile.TemporaryDirectory(prefix="castiron-trial-") as folder:
        libraries: dict[object, str] = {}

        def library(kernel: CudaKernel | HostKernel) -> str:
            if kernel not in libraries:
                image = compile_native(kernel) if isinstance(kernel, HostKernel) else emulated_library(kernel)
                path = Path(folder, f"{len(libraries)}.so")
                path.write_bytes(image)
                libraries[kernel] = str(path)
            return libraries[kernel]

        runs: list[NativeRun | CudaRun | TritonRun] = []
        for action in lowering.actions:
            if not isinstance(action, Call):
                raise BuildError(
                    "a trial cannot follow a tactic that makes views; give it one that only calls"
                )
            unknown = [name for name in (*action.inputs, *action.outputs) if name not in place.tensors]
            if unknown:
                raise BuildError(
                    f"its call of {action.kernel!r} names {unknown[0]!r}, which is no operand, result or "
                    f"temporary; known: {', '.join(place.tensors)}"
                )
            weights = [_weight(use, case, op, place) for use in action.weights]
            for launch in action.launches:
                run = _launch(launch, action, weights, place, file, library)
                if run is not None:
                    runs.append(run)
            if not action.launches:
                raise BuildError(
                    f"its call of {action.kernel!r} has no launch: castiron's own kernels are not tried"
                )
        job = TrialJob(place.memory, tuple(runs), tuple(operand.name for operand in op.outputs))
        return _in_child(job)


def _place(case: Case, op: Op, lowering: Lowering, storage: Storage, views: bool) -> _Placement:
    place = _Placement(None if case.paged is None else case.paged.layout)
    for operand, array in zip(op.inputs, case.inputs, strict=True):
        if operand is None or array is None or operand.constant:
            continue
        content = array.astype(_NUMPY[storage])
        offset, stride = 0, array.shape[-1] if array.ndim else 1
        if views and may_be_view(operand):
            # What lies beside a view is another value's: NaN, so that a kernel that reads it shows.
            wide = np.full((array.shape[0], array.shape[1] + 2 * _MARGIN), np.nan, content.dtype)
            wide[:, _MARGIN : _MARGIN + array.shape[1]] = content
            content, stride, offset = wide, wide.shape[1], _MARGIN * content.dtype.itemsize
        place.memory[operand.name] = Memory(content, writable=False)
        place.tensors[operand.name] = Tensor(operand.name, storage, array.shape, stride, offset)
    if case.paged is not None:
        for name, array in {**case.paged.inputs, _POOL: case.paged.pool}.items():
            place.memory[name] = Memory(array, writable=False)
    for operand in (*op.outputs, *lowering.temporaries):
        shape = bound(operand.shape)
        dtype = _NUMPY[operand.dtype]
        unwritten = np.full(shape, np.nan, dtype) if dtype.kind != "i" else np.full(shape, -1, dtype)
        place.memory[operand.name] = Memory(unwritten, writable=True)
        kind: Any = operand.dtype
        place.tensors[operand.name] = Tensor(operand.name, kind, shape, shape[-1] if shape else 1)
    return place


def _weight(use: WeightUse, case: Case, op: Op, place: _Placement) -> str:
    """Place a weight as lowering would store it; returns its name."""
    by_name = {o.name: a for o, a in zip(op.inputs, case.inputs, strict=True) if o is not None}
    parts = [by_name[part] for part in use.parts]
    content = np.concatenate([np.asarray(part) for part in parts])
    kind: Storage = "f32" if use.role == "vector" else "bf16"
    name = f"{'|'.join(use.parts)}.{use.role}"
    place.memory[name] = Memory(content.astype(_NUMPY[kind]), writable=False)
    place.tensors[name] = Tensor(name, kind, content.shape, content.shape[-1])
    return name


def _launch(
    launch: KernelLaunch,
    call: Call,
    weights: Sequence[str],
    place: _Placement,
    file: Path,
    library: Callable[[CudaKernel | HostKernel], str],
) -> NativeRun | CudaRun | TritonRun | None:
    kernel = launch.kernel
    if isinstance(kernel, HostKernel):
        inputs, read, outputs = (
            tuple(place.tensors[name] for name in names) for names in (call.inputs, weights, call.outputs)
        )
        return NativeRun(library(kernel), kernel.function, inputs, read, outputs, parts=3)
    if launch.when is not None and not launch.when.low <= COUNTS.get(launch.when.of, 0) <= launch.when.high:
        return None
    symbols = [dim.of for dim in launch.grid if dim.of is not None and dim.of not in COUNTS]
    if symbols:
        raise BuildError(f"a grid counts {symbols[0]!r}; expected one of {', '.join(COUNTS)}")
    blocks = [dim.blocks(COUNTS, _MULTIPROCESSORS) for dim in launch.grid]
    if 0 in blocks:
        raise BuildError(f"a launch has the grid {blocks}, so it would do nothing")
    arguments = tuple(_argument(param, weights, place) for param in launch.args)
    if isinstance(kernel, CudaKernel):
        x, y, z = (*blocks, 1, 1)[:3]
        return CudaRun(library(kernel), (x, y, z), kernel.threads, kernel.shared_bytes, arguments)
    assert isinstance(kernel, TritonKernel)
    name = kernel.function.fn.__qualname__
    return TritonRun(str(file), name, tuple(blocks), dict(kernel.types), arguments, dict(kernel.constants))


def _argument(param: Param, weights: Sequence[str], place: _Placement) -> Argument:
    match param.kind:
        case "value" if str(param.of) in place.memory and str(param.of) not in place.tensors:
            return ("array", str(param.of), 0)
        case "value" | "row_stride" if str(param.of) not in place.tensors:
            raise BuildError(f"its launch reads {param.of!r}; known values: {', '.join(place.tensors)}")
        case "value":
            tensor = place.tensors[str(param.of)]
            return ("array", tensor.memory, tensor.offset)
        case "row_stride":
            return ("i32", place.tensors[str(param.of)].row_stride)
        case "weight":
            return ("array", weights[int(param.of)], 0)
        case "size":
            return ("i32", COUNTS[str(param.of)])
        case "i32" | "i64" | "f32":
            return (param.kind, param.of)
        case "input" if str(param.of) in place.memory:
            return ("array", str(param.of), 0)
        case "k_cache" if place.kv is not None:
            return ("array", _POOL, place.kv.k_offsets[int(param.of)])
        case "v_cache" if place.kv is not None:
            return ("array", _POOL, place.kv.v_offsets[int(param.of)])
        case _:
            raise BuildError(
                f"its launch reads {param.kind} {param.of!r}, which this trial lacks; an Example with "
                "kv=(kv_heads, head_dim, v_head_dim) has a paged cache and its step inputs"
            )


def _in_child(job: TrialJob) -> TrialAnswer:
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; "
               "from castiron.build.trials.child import main; main()"]  # fmt: skip
    try:
        done = subprocess.run(
            command, input=pickle.dumps(job), capture_output=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return TrialAnswer(problem=f"the kernel did not end within {_SECONDS:.0f} s")
    if done.returncode == 0:
        answer = pickle.loads(done.stdout)
        assert isinstance(answer, TrialAnswer)
        return answer
    if done.returncode in (-11, -7):
        return TrialAnswer(
            problem="the kernel read outside of its operands, or wrote where it must not (memory fault; the "
            "pages around each operand are forbidden, and inputs are read-only)"
        )
    words = done.stderr.decode(errors="replace").strip().splitlines()
    return TrialAnswer(problem=f"its process ended with code {done.returncode}: {' '.join(words[-2:])}")
