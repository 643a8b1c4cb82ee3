"""The loop of a process that compiles kernels: jobs come in by stdin, answers go out by stdout, pickled."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from typing import Any

from .job import CompileError, CudaJob, TritonJob


def main() -> None:
    """Serve until stdin ends. An answer is ``(Compiled, "")`` or ``(None, the compiler's words)``."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not end up between the answers
    with tempfile.TemporaryDirectory(prefix="castiron-triton-") as folder:
        from triton import knobs  # type: ignore[import-untyped]

        # Triton's cache has no bound and no check of its contents; the build keeps its own.
        knobs.cache.dir = folder
        # Line tables would make equal kernels differ by the path of the source tree, and double their size.
        knobs.compilation.disable_line_info = True
        while True:
            try:
                job = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            pickle.dump(_answer(job), answers)
            answers.flush()


def _answer(job: TritonJob | CudaJob) -> tuple[Any, str]:
    try:
        if isinstance(job, TritonJob):
            from .triton_compiler import compile_triton

            return compile_triton(job), ""
        from .cuda_compiler import compile_cuda

        return compile_cuda(job), ""
    except CompileError as failure:
        return None, str(failure)
    except Exception as error:  # an import that fails in a plugin, a tool that is missing
        return None, f"{type(error).__name__}: {error}"
