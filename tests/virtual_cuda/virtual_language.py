"""Turns this process's Triton language into the interpreter's, once and for good.

The interpreter patches ``triton.language`` around every kernel and every call between jit functions, which
takes longer than the kernels of a tiny model. A process that only interprets keeps the patches instead.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterOptions
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).parents[1] / "plugins" / "cuda"))
from interpret import interpreting, rewritten

_patches = ExitStack()  # never closed
_functions: dict[Any, Any] = {}
_numpy_types: dict[str, np.dtype[Any]] = {}
_original_numpy_type = interpreter._get_np_dtype


def interpret_for_good() -> None:
    """Patch the language; kernels and what they call then run as Python functions."""
    if JITFunction.__call__ is _call:
        return
    _patches.enter_context(interpreting())
    JITFunction.__call__ = _call
    interpreter._get_np_dtype = _numpy_type
    # Overflow of 32-bit offsets cannot happen in tiny models, and looking for it takes a third of the time.
    interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    # The patch takes the modules that a function's globals hold.
    interpreter._patch_lang(FunctionType(interpret_for_good.__code__, {"tl": tl, "core": tl.core}))


def as_python(function: JITFunction[Any]) -> Any:
    """The interpreted form of a jit function."""
    found = _functions.get(function.fn)
    if found is None:
        found = _functions[function.fn] = rewritten(function).rewrite()
    return found


def _call(self: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
    return as_python(self)(*args, **kwargs)


def _numpy_type(dtype: Any) -> np.dtype[Any]:
    # By name: the interpreter's own makes a table of all types for each look-up.
    name = str(dtype)
    found = _numpy_types.get(name)
    if found is None:
        found = _numpy_types[name] = _original_numpy_type(dtype)
    return found
