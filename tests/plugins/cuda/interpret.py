"""Runs what CUDA tactics ask for on this machine: launches become loops of the Triton interpreter.

``run_call`` resolves a Call's launches on torch tensors, as the device resolves them on its memory, and
``interpret`` runs one kernel. Neither needs TRITON_INTERPRET, so that the same process can compile the same
functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from castiron.plugins import Call
from castiron.plugins.launch import Grid, Param, TritonKernel
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

TORCH = {"f32": torch.float32, "i32": torch.int32, "bf16": torch.bfloat16, "f16": torch.float16}
_FUNCTIONS: dict[Any, Any] = {}


def _as_numbers(handle: Any) -> np.ndarray[Any, Any]:
    """A block's numbers; the interpreter keeps bfloat16 as bit patterns."""
    if handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(handle.data)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    # The interpreter's own product multiplies the bit patterns of bfloat16 operands.
    product = np.matmul(_as_numbers(a).astype(np.float32), _as_numbers(b).astype(np.float32))
    return TensorHandle(product + d.data, d.dtype.scalar)


def _cast(original: Any) -> Any:
    """The interpreter's cast, but to the nearest bfloat16 (ties to even), as GPUs do; it truncates."""

    def cast(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            numbers = torch.from_numpy(np.ascontiguousarray(source.data))
            bits = numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            return TensorHandle(bits.reshape(source.data.shape), tl.bfloat16)
        return original(self, source, target)

    return cast


def rewritten(function: JITFunction) -> Any:
    # By the Python function: the hash of a JITFunction depends on what it refers to, which is patched here.
    if function.fn not in _FUNCTIONS:
        _FUNCTIONS[function.fn] = InterpretedFunction(function.fn)
    return _FUNCTIONS[function.fn]


def _call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """A call from kernel to function. The module that the function sees as ``tl`` or ``core`` is patched."""
    scope = interpreter._patch_lang(self.fn)
    try:
        return rewritten(self).rewrite()(*args, **kwargs)
    finally:
        scope.restore()


@contextmanager
def interpreting() -> Iterator[None]:
    """Inside, jit functions that call each other run as Python, and products of bfloat16 are right."""
    dot, cast, call = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, JITFunction.__call__
    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = _dot, _cast(cast)
    JITFunction.__call__ = _call
    try:
        with np.errstate(all="ignore"):  # as on a GPU, infinities and NaNs are numbers
            yield
    finally:
        InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, JITFunction.__call__ = dot, cast, call


def interpret(
    function: JITFunction, grid: Sequence[int], args: Mapping[str, Any], constants: Mapping[str, Any]
) -> None:
    """Run a kernel over its grid; ``args`` and ``constants`` by parameter name."""
    with interpreting():
        rewritten(function)[tuple(grid)](**args, **constants)


def grid_size(grid: Grid, counts: Mapping[str, int], multiprocessors: int = 4) -> int:
    """Blocks of one grid dimension, as docs/cuda-program.md defines it."""
    blocks = grid.times * (1 if grid.of is None else -(-counts[grid.of] // grid.per))
    return min(blocks, grid.per_sm * multiprocessors) if grid.per_sm else blocks


def run_call(
    call: Call,
    values: Mapping[str, torch.Tensor],
    weights: Sequence[torch.Tensor] = (),
    counts: Mapping[str, int] | None = None,
    step: Mapping[str, torch.Tensor] | None = None,
    caches: Mapping[tuple[str, int], torch.Tensor] | None = None,
) -> list[str]:
    """Run the launches whose condition holds. Returns the names of their functions.

    values: by name; a column view is a strided tensor. weights: as call.weights. counts: of the symbols.
    step: arrays of the step's input block. caches: ("k_cache" | "v_cache", layer) to memory.
    """
    counts, step, caches = counts or {}, step or {}, caches or {}

    def resolve(param: Param) -> Any:
        match param.kind:
            case "value":
                name = str(param.of)
                return values[name] if name in values else step[name]
            case "row_stride":
                tensor = values[str(param.of)]
                return tensor.stride(0)
            case "weight":
                return weights[int(param.of)]
            case "input":
                return step[str(param.of)]
            case "k_cache" | "v_cache":
                return caches[param.kind, int(param.of)]
            case "size":
                return counts[str(param.of)]
            case _:
                return param.of

    ran = []
    for launch in call.launches:
        when = launch.when
        if when is not None and not when.low <= counts[when.of] <= when.high:
            continue
        kernel = launch.kernel
        assert isinstance(kernel, TritonKernel), "only Triton kernels can be interpreted"
        names = list(kernel.types)
        assert len(names) == len(launch.args), f"{len(names)} parameters, {len(launch.args)} arguments"
        args = dict(zip(names, map(resolve, launch.args), strict=True))
        for name, argument in args.items():
            _check_type(kernel, name, argument)
        grid = [grid_size(dimension, counts) for dimension in launch.grid]
        if 0 not in grid:
            interpret(kernel.function, grid, args, kernel.constants)
            ran.append(kernel.function.__name__)
    return ran


def _check_type(kernel: TritonKernel, name: str, argument: Any) -> None:
    """A kernel compiled for one element type must not be given another."""
    declared = kernel.types[name]
    if isinstance(argument, torch.Tensor):
        found = "*" + triton.runtime.jit.mangle_type(argument).lstrip("*")
        assert found == declared, f"{kernel.function.__name__}: {name} is {found}, compiled for {declared}"
    else:
        assert declared in ("i32", "i64", "fp32"), f"{name} is a number, compiled for {declared}"


__all__ = ["TORCH", "grid_size", "interpret", "interpreting", "rewritten", "run_call"]
