"""The cases of a trial: an example's operands as numbers, and what they must become."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from castiron.errors import BuildError

from ...plugins.sdk import Example, Plugin
from ...plugins.tactic import Dims, Op, Operand
from .paged import PagedCase, paged_case

Array = np.ndarray[Any, Any]
#: Counts of the step that is tried, those of ``paged``: none a multiple of a tile.
COUNTS: Mapping[str, int] = {"T": 13, "N": 5, "S": 3, "D": 3, "P": 2}
_SEED = 20_26


@dataclass(frozen=True)
class Case:
    """An example with numbers: operands by index, and what they must become."""

    example: Example
    op: Op
    inputs: tuple[Array | None, ...]
    expected: tuple[Array, ...]
    paged: PagedCase | None = None


def bound(shape: Dims) -> tuple[int, ...]:
    """A shape with the trial's counts in place of symbols; raises BuildError for one that is none."""
    for dim in shape:
        if not (dim in COUNTS if isinstance(dim, str) else isinstance(dim, int) and dim > 0):
            raise BuildError(
                f"the shape {shape!r} has the size {dim!r}; expected a number or {', '.join(COUNTS)}"
            )
    return tuple(COUNTS[dim] if isinstance(dim, str) else dim for dim in shape)


def make_case(plugin: Plugin, example: Example, number: int) -> Case:
    """Example ``number`` of a plugin. Raises BuildError when it contradicts itself or its op."""
    random = np.random.default_rng([_SEED, zlib.crc32(example.op.encode()), number])
    inputs = [
        None if shape is None else random.standard_normal(bound(shape), np.float32)
        for shape in example.shapes
    ]
    definition = next((op for op in plugin.all_ops if op.name == example.op), None)
    reference: Callable[..., Any] | None
    if definition is not None:
        reference = definition.reference
    else:
        reference = next((t.reference for t in plugin.tactics if t.kind == example.op and t.reference), None)
    if reference is None:
        raise BuildError(f"{example.op} has no reference to compare with; give its tactic one")
    where = f"example {number} ({example.op})"
    try:
        paged = None if example.kv is None else paged_case(*example.kv, random)
        extra = {} if paged is None else {"step": paged.step}
        result = reference(*inputs, **example.attributes, **extra)
        results = tuple(np.asarray(r) for r in (result if isinstance(result, tuple) else (result,)))
        shapes = (
            [tuple(shape) for shape in definition.shape(*example.shapes, **example.attributes)]
            if definition is not None
            else [_symbolic(r.shape) for r in results]
        )
    except Exception as error:
        raise BuildError(
            f"{where}: its reference or shape rule failed: {type(error).__name__}: {error}"
        ) from error
    if [bound(shape) for shape in shapes] != [r.shape for r in results]:
        raise BuildError(
            f"{where}: its reference gives {[r.shape for r in results]}, its shape rule {shapes} "
            f"(with T = {COUNTS['T']}, N = {COUNTS['N']})"
        )
    operands = tuple(
        None if shape is None else Operand(f"x{i}", tuple(shape), "f32", i in example.constant)
        for i, shape in enumerate(example.shapes)
    )
    outputs = tuple(Operand(f"y{i}", tuple(shape)) for i, shape in enumerate(shapes))
    op = Op(example.op, operands, outputs, dict(example.attributes))
    return Case(example, op, tuple(inputs), tuple(r.astype(np.float32) for r in results), paged)


def _symbolic(shape: tuple[int, ...]) -> Dims:
    """Rows that number T or N are taken to be those."""
    names = {COUNTS["T"]: "T", COUNTS["N"]: "N"}
    return (names.get(shape[0], shape[0]), *shape[1:]) if shape else shape
