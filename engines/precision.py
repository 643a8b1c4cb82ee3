"""The precision of an engine: the dtype that it was built in, and what its matrices are stored as."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from .program import Program

#: Kernels of the host whose first weight is a matrix that is not quantized.
_PRODUCTS = ("linear", "gated_linear", "expert_linear", "expert_gated_linear")
_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def stored_dtypes(programs: Iterable[Program]) -> list[str]:
    """What the matrices of host programs that are not quantized are stored as, the most first.

    Other than the dtype of the engine where a float32 engine keeps the numbers of a bf16 checkpoint in bf16.
    """
    sizes: Counter[str] = Counter()
    for program in programs:
        weights = {weight.name: weight for weight in program.weights}
        for step in program.steps:
            if program.target == "host" and step.kernel in _PRODUCTS:
                matrix = weights[step.weights[0]]
                sizes[_NAMES.get(matrix.dtype, matrix.dtype)] += math.prod(matrix.shape)
    return [name for name, _ in sizes.most_common()]


def precision(dtype: str, recipe: str | None, programs: Iterable[Program]) -> str:
    """For people: "float32 (weights stored as bfloat16)", "bfloat16, quantized by int8-wo".

    Args:
        dtype: of the engine.
        recipe: of its quantization, if it has any.
    """
    text = dtype if recipe is None else f"{dtype}, quantized by {recipe}"
    stored = stored_dtypes(programs)
    if stored in ([], [dtype]):
        return text
    return f"{text} ({'' if recipe is None else 'other '}weights stored as {' and '.join(stored)})"
