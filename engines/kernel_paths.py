"""Which kernels a pass of a program goes through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .program import Program


def kernel_paths(program: Program) -> dict[str, int]:
    """{kernel: steps that it computes}. On CUDA the compiled kernels that steps may launch (decode and
    prefill have kernels of their own); on host the op with the type and layout of the matrix that it reads.
    """
    return dict(Counter(_names(program)))


def _names(program: Program) -> Iterator[str]:
    weights = {weight.name: weight for weight in program.weights}
    for step in program.steps:
        if step.launches:
            yield from {program.kernels[launch.kernel].name for launch in step.launches}
        else:
            read = next((weights[name] for name in step.weights if name in weights), None)
            plain = read is None or len(read.shape) < 2
            yield step.kernel if plain or read is None else f"{step.kernel} {read.dtype} {read.layout}"
