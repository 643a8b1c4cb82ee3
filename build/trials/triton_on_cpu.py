"""Triton kernels on the CPU: the interpreter, made right where it differs from a GPU.

Neither this nor its callers need TRITON_INTERPRET, so that the same process can compile the same functions.
"""

# mypy: disable-error-code="no-untyped-call, misc"
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from types import FunctionType
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl  # type: ignore[import-untyped]
from triton.runtime import interpreter  # type: ignore[import-untyped]
from triton.runtime.interpreter import (  # type: ignore[import-untyped]
    InterpretedFunction,
    InterpreterBuilder,
    TensorHandle,
    interpreter_builder,
)
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

_FUNCTIONS: dict[Any, Any] = {}
#: What bfloat16 numbers go through besides casts. Types whose casts to bfloat16 the interpreter gets wrong.
_ARITHMETIC = ("create_fadd", "create_fsub", "create_fmul")
_BYTES = (tl.int8, tl.uint8, tl.float8e4nv)


def _as_numbers(handle: Any) -> np.ndarray[Any, Any]:
    """A block's numbers; the interpreter keeps bfloat16 and 8-bit floats as bit patterns."""
    if handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16:
        numbers: np.ndarray[Any, Any] = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return numbers
    if handle.dtype.scalar == tl.float8e4nv and handle.data.dtype == np.uint8:
        floats: np.ndarray[Any, Any] = handle.data.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return floats
    return np.asarray(handle.data)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    # The interpreter's own product multiplies the bit patterns of bfloat16 operands.
    exact = np.float64 if d.dtype.scalar == tl.int32 else np.float32
    product = np.matmul(_as_numbers(a).astype(exact), _as_numbers(b).astype(exact))
    return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _scale(original: Any) -> Any:
    """The scales of a scaled product as numbers, also those of NVFP4, which are float8."""

    def scale(handle: Any, compute_type: Any) -> Any:
        if handle.dtype.scalar == tl.float8e4nv:
            return _as_numbers(handle)
        return original(handle, compute_type)

    return scale


def _cast(original: Any) -> Any:
    """The interpreter's cast, but to the nearest bfloat16 (ties to even), as GPUs do; it truncates."""

    def cast(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            numbers = torch.from_numpy(np.ascontiguousarray(source.data))
            bits = numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            return TensorHandle(bits.reshape(source.data.shape), tl.bfloat16)
        if target.scalar == tl.bfloat16 and source.dtype.scalar in _BYTES:
            numbers = TensorHandle(_as_numbers(source).astype(np.float32), tl.float32)
            return cast(self, numbers, target)
        return original(self, source, target)

    return cast


def _bfloat16_too(original: Any, cast: Any) -> Any:
    """A sum, difference or product that takes bfloat16 as numbers; the interpreter's takes bit patterns."""

    def compute(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return original(self, a, b)
        numbers = (TensorHandle(_as_numbers(operand), tl.float32) for operand in (a, b))
        return cast(self, original(self, *numbers), tl.bfloat16)

    return compute


def rewritten(function: JITFunction) -> Any:
    """The function for the interpreter."""
    # By the Python function: the hash of a JITFunction depends on what it refers to, which is patched here.
    if function.fn not in _FUNCTIONS:
        _FUNCTIONS[function.fn] = InterpretedFunction(function.fn)
    return _FUNCTIONS[function.fn]


def _call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """A call from kernel to function, as Python calls functions."""
    return rewritten(self).rewrite()(*args, **kwargs)


def _numpy_type(original: Any) -> Any:
    """The interpreter makes a table of all types for each look-up; this one remembers."""
    known: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        name = str(dtype)
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    return numpy_type


@contextmanager
def interpreting() -> Iterator[None]:
    """Inside, jit functions that call each other run as Python, and products of bfloat16 are right."""
    dot, cast, call = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, JITFunction.__call__
    numpy_type, scale = interpreter._get_np_dtype, interpreter._dot_scaled_scale_to_f32
    arithmetic = {name: getattr(InterpreterBuilder, name) for name in _ARITHMETIC}
    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = _dot, _cast(cast)
    for name, original in arithmetic.items():
        setattr(InterpreterBuilder, name, _bfloat16_too(original, InterpreterBuilder.cast_impl))
    JITFunction.__call__, interpreter._get_np_dtype = _call, _numpy_type(numpy_type)
    interpreter._dot_scaled_scale_to_f32 = _scale(scale)
    # The interpreter patches the modules that a function's globals hold; once for all functions here, because
    # patching at each call takes longer than the kernels do.
    scope = interpreter._patch_lang(FunctionType(_call.__code__, {"tl": tl, "core": tl.core}))
    try:
        with np.errstate(all="ignore"):  # as on a GPU, infinities and NaNs are numbers
            yield
    finally:
        scope.restore()
        InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, JITFunction.__call__ = dot, cast, call
        for name, original in arithmetic.items():
            setattr(InterpreterBuilder, name, original)
        interpreter._get_np_dtype, interpreter._dot_scaled_scale_to_f32 = numpy_type, scale


def interpret(
    function: JITFunction, grid: Sequence[int], args: Mapping[str, Any], constants: Mapping[str, Any]
) -> None:
    """Run a kernel over its grid; ``args`` and ``constants`` by parameter name."""
    with interpreting():
        rewritten(function)[tuple(grid)](**args, **constants)


def interpret_at(
    function: JITFunction,
    grid: Sequence[int],
    types: Mapping[str, str],
    numbers: Sequence[int | float],
    constants: Mapping[str, Any],
) -> None:
    """Run a kernel on raw memory.

    types: Triton types of the run-time parameters by name; numbers: their addresses and numbers, in order.
    Blocks run backwards: a kernel must not depend on their order, and GPUs start with the first.
    """
    args = {name: argument(kind, number) for (name, kind), number in zip(types.items(), numbers, strict=True)}
    sizes = (*grid, 1, 1)[:3]
    with interpreting():
        call = rewritten(function).rewrite()
        scope = interpreter._patch_lang(function.fn)
        try:
            interpreter_builder.set_grid_dim(*sizes)
            for block in product(*(range(size - 1, -1, -1) for size in sizes)):
                interpreter_builder.set_grid_idx(*block)
                call(**args, **constants)
        finally:
            scope.restore()


def argument(kind: str, number: int | float) -> Any:
    """A run-time argument of a Triton type as a tensor of the interpreter."""
    element = tl.str_to_ty(kind, None)
    dtype = np.uint64 if kind.startswith("*") else {"fp32": np.float32, "i64": np.int64}.get(kind, np.int32)
    return tl.tensor(TensorHandle(np.array([number], dtype), element), element)
