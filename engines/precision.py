"""The precision of an engine: the dtype that it was built in, and what its matrices are stored as."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from .manifest import Manifest
from .program import Program

_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def stored_dtypes(programs: Iterable[Program]) -> list[str]:
    """What the matrices of host programs that are not quantized are stored as, the most first.

    Other than the dtype of the engine where a float32 engine keeps the numbers of a bf16 checkpoint in bf16.
    """
    sizes: Counter[str] = Counter()
    for program in programs:
        weights = {weight.name: weight for weight in program.weights}
        for step in program.steps:
            if program.target == "host" and step.kernel in ("linear", "gated_linear"):
                matrix = weights[step.weights[0]]
                sizes[_NAMES.get(matrix.dtype, matrix.dtype)] += math.prod(matrix.shape)
    return [name for name, _ in sizes.most_common()]


def precision(manifest: Manifest, programs: Iterable[Program]) -> str:
    """For people: "float32 (weights stored as bfloat16)", "bfloat16, quantized by int8-wo"."""
    dtype, quantization = manifest.model.dtype, manifest.quantization
    text = dtype if quantization is None else f"{dtype}, quantized by {quantization.recipe}"
    stored = stored_dtypes(programs)
    if stored in ([], [dtype]):
        return text
    return f"{text} ({'' if quantization is None else 'other '}weights stored as {' and '.join(stored)})"
