"""The process in which a plugin's kernels run: what they break, breaks here.

Reads a pickled TrialJob from stdin and writes a pickled TrialAnswer to stdout.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .emulate import EmulatedKernel
from .guarded import GuardedBuffer
from .job import Argument, CudaRun, NativeRun, Tensor, TrialAnswer, TrialJob, TritonRun

_DTYPES = {"f32": 0, "i32": 1, "bf16": 2}
_FORMATS = {"array": "<Q", "i32": "<i", "i64": "<q", "f32": "<f"}
_MAX_RANK = 6


class _Tensor(ctypes.Structure):
    """castiron_tensor of castiron_plugin.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * _MAX_RANK),
        ("row_stride", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    """castiron_call of castiron_plugin.h."""

    _fields_ = (
        ("part", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("num_weights", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("inputs", ctypes.POINTER(_Tensor)),
        ("weights", ctypes.POINTER(_Tensor)),
        ("outputs", ctypes.POINTER(_Tensor)),
    )


class _Runner:
    def __init__(self, job: TrialJob) -> None:
        self.memory = {
            name: GuardedBuffer(memory.content.tobytes(), read_only=not memory.writable)
            for name, memory in job.memory.items()
        }
        self.job = job

    def run(self) -> TrialAnswer:
        for run in self.job.runs:
            if isinstance(run, NativeRun):
                problem = self.native(run)
            elif isinstance(run, CudaRun):
                problem = self.cuda(run)
            else:
                problem = self.triton(run)
            if problem:
                return TrialAnswer(problem=problem)
        for name, buffer in self.memory.items():
            if not buffer.intact():
                return TrialAnswer(
                    problem=f"a kernel wrote outside of {name}, right before its start or behind its end"
                )
        results = {}
        for name in self.job.results:
            before = self.job.memory[name].content
            results[name] = self.memory[name].array(before.dtype, before.shape).copy()
        return TrialAnswer(results)

    def native(self, run: NativeRun) -> str:
        function = ctypes.CDLL(run.library)[run.function]
        function.restype = ctypes.c_char_p
        groups = [self.tensors(group) for group in (run.inputs, run.weights, run.outputs)]
        sizes = [len(group) for group in (run.inputs, run.weights, run.outputs)]
        for part in range(run.parts):
            call = _Call(part, run.parts, *sizes, *groups)
            complaint = function(ctypes.byref(call))
            if complaint is not None:
                return f"the kernel reports: {complaint.decode(errors='replace')}"
        return ""

    def tensors(self, group: tuple[Tensor, ...]) -> Any:
        array = (_Tensor * max(1, len(group)))()
        for entry, tensor in zip(array, group, strict=False):
            entry.data = self.memory[tensor.memory].address + tensor.offset
            entry.dtype = _DTYPES[tensor.dtype]
            entry.rank = len(tensor.shape)
            entry.shape[: len(tensor.shape)] = tensor.shape
            entry.row_stride = tensor.row_stride
        return array

    def cuda(self, run: CudaRun) -> str:
        params = [struct.pack(_FORMATS[argument[0]], self.number(argument)) for argument in run.arguments]
        fault = EmulatedKernel(run.library).launch(run.grid, (run.threads, 1, 1), run.shared_bytes, params)
        if fault is None:
            return ""
        found = {name: buffer.where(fault.address) for name, buffer in self.memory.items()}
        place = next((f"{text} of {name}" for name, text in found.items() if text), "far from every operand")
        return (
            "the kernel read outside of its operands, or wrote where it must not: "
            f"{place}, by thread {fault.thread} of block {fault.block}"
        )

    def number(self, argument: Argument) -> Any:
        """An array's address, or the number that is given."""
        if argument[0] == "array":
            return self.memory[argument[1]].address + argument[2]  # type: ignore[misc]
        return argument[1]

    def triton(self, run: TritonRun) -> str:
        from .triton_on_cpu import interpret_at

        numbers = [self.number(argument) for argument in run.arguments]
        function = getattr(_plugin_module(run.file), run.function)
        interpret_at(function, run.grid, run.types, numbers, run.constants)
        return ""


def _plugin_module(file: str) -> Any:
    from ...plugins.sdk import load_module

    return load_module(Path(file))


def main() -> None:
    """Run one job."""
    job = pickle.load(sys.stdin.buffer)
    assert isinstance(job, TrialJob)
    answer_to = sys.stdout.buffer
    sys.stdout = sys.stderr  # what a plugin prints must not mix with the answer
    with np.errstate(all="ignore"):
        try:
            answer = _Runner(job).run()
        except Exception as error:
            answer = TrialAnswer(problem=f"{type(error).__name__}: {error}")
    answer_to.write(pickle.dumps(answer))
    answer_to.flush()


if __name__ == "__main__":
    main()
