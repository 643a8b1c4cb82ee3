"""The loop of a process that compiles kernels: jobs come in by stdin, answers go out by stdout, pickled."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from castiron.interrupts import at_start, raised

from .cuda_compiler import compile_cuda
from .job import CompileError, CudaJob, TritonJob
from .triton_compiler import TritonCompiler


def main() -> None:
    """Serve until stdin ends. An answer is ``(Compiled, "")`` or ``(None, the compiler's words)``."""
    at_start()  # a terminal's Ctrl-C comes here, too, and compilers have temporary folders
    with raised():
        _serve()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not end up between the answers
    from triton import knobs  # type: ignore[import-untyped]

    # Line tables would make equal kernels differ by the path of the source tree, and double their size.
    knobs.compilation.disable_line_info = True
    triton = TritonCompiler()
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_answer(job, triton), answers)
        answers.flush()


def _answer(job: TritonJob | CudaJob, triton: TritonCompiler) -> tuple[Any, str]:
    try:
        return triton.compile(job) if isinstance(job, TritonJob) else compile_cuda(job), ""
    except CompileError as failure:
        return None, str(failure)
    except Exception as error:  # an import that fails in a plugin, a tool that is missing
        return None, f"{type(error).__name__}: {error}"
