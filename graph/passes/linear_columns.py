"""Which columns of a Linear's output a rearranged tensor holds.

Fused projections are cut in many ways (per head, per group, all queries first ...). Instead of a pattern for
each, the rearrangement is carried out on the numbers of the columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .rewriter import CASTIRON, Node, Rewriter, Tensor, ints_of, optional_input, producer, shape_of

_MOVES = ("Reshape", "Transpose", "Slice", "Split", "Gather", "Squeeze", "Unsqueeze", "Expand", "Identity")
#: Two tokens tell apart what depends on the token and what does not.
_TOKENS = 2


def rows_of_linear(rewriter: Rewriter, tensor: Tensor, token_axis: int) -> Tensor | None:
    """``tensor`` [1, .., T, ..] as packed rows, if it only rearranges the output of one Linear.

    The result is that output, a run of its columns, or a Linear with rearranged weight rows (a column that
    appears several times is computed as often). None if something else than data movement is in between.
    """
    chain: list[tuple[Node, Tensor]] = []
    current = tensor
    node = producer(current)
    while node is not None and node.op in _MOVES and not node.domain:
        chain.append((node, current))
        current = node.inputs[0]
        node = producer(current)
    if node is None or node.op != "Linear" or node.domain != CASTIRON:
        return None
    dims = shape_of(current)
    if dims[:-1] not in ((1, "T"), ("T",)) or not isinstance(dims[-1], int):
        return None
    width = dims[-1]
    numbers = np.arange(_TOKENS * width).reshape(*(d if isinstance(d, int) else _TOKENS for d in dims))
    for move, output in reversed(chain):
        moved = _carry_out(move, output, numbers)
        if moved is None:
            return None
        numbers = moved
    by_token = np.moveaxis(numbers, token_axis, 0).reshape(_TOKENS, -1)
    columns = by_token[0]
    if not np.array_equal(by_token[1], columns + width) or columns.max() >= width:
        return None
    start, stop = int(columns[0]), int(columns[0]) + len(columns)
    if np.array_equal(columns, np.arange(start, stop)):
        rows = rewriter.reshape(current, ["T", width], f"{current.name}.rows")
        return rewriter.columns(rows, start, stop, f"{tensor.name}.rows")
    return _rearranged(rewriter, node, columns, tensor)


def _carry_out(node: Node, output: Tensor, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    target = tuple(d if isinstance(d, int) else _TOKENS for d in shape_of(output))
    if node.op in ("Reshape", "Squeeze", "Unsqueeze", "Identity"):
        return numbers.reshape(target) if numbers.size == np.prod(target) else None
    if node.op == "Transpose":
        return numbers.transpose(node.attrs.get("perm", range(numbers.ndim)[::-1]))
    if node.op == "Expand":
        return np.broadcast_to(numbers, target)
    if node.op == "Gather":
        indices = ints_of(node.inputs[1])
        if indices is None:
            return None
        shaped = np.asarray(indices, np.int64).reshape([int(d) for d in shape_of(node.inputs[1])])
        return np.take(numbers, shaped, axis=int(node.attrs.get("axis", 0)))
    if node.op == "Split":
        axis = int(node.attrs.get("axis", 0)) % numbers.ndim
        sizes = [shape_of(t)[axis] for t in node.outputs]
        index = next(i for i, t in enumerate(node.outputs) if t is output)
        if any(isinstance(size, str) for size in sizes):
            return None
        start = sum(int(size) for size in sizes[:index])
        return np.take(numbers, np.arange(start, start + int(sizes[index])), axis=axis)
    return _slice(node, numbers)


def _slice(node: Node, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    given = [ints_of(t) for t in node.inputs[1:]]
    if any(values is None for values in given) or len(given) < 2:
        return None
    starts, ends = given[0] or [], given[1] or []
    axes = given[2] if len(given) > 2 and given[2] else list(range(len(starts)))
    steps = given[3] if len(given) > 3 and given[3] else [1] * len(starts)
    slices = [slice(None)] * numbers.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 1 or shape_of(node.inputs[0])[axis] == "T":
            return None
        slices[axis] = slice(start, end, step)
    return numbers[tuple(slices)]


def _rearranged(
    rewriter: Rewriter, linear: Node, columns: np.ndarray[Any, Any], tensor: Tensor
) -> Tensor | None:
    if optional_input(linear, 3) is not None or linear.attrs.get("activation", "none") != "none":
        return None
    indices = rewriter.constant(columns.astype(np.int64), "columns")
    operands = [
        None
        if operand is None
        else rewriter.op(
            "Gather",
            [operand, indices],
            [len(columns), *shape_of(operand)[1:]],
            attrs={"axis": 0},
            dtype=operand.dtype,
            hint=f"{operand.name}.{tensor.name.rsplit('/', 1)[-1]}",
        )
        for operand in (linear.inputs[1], optional_input(linear, 2))
    ]
    x = linear.inputs[0]
    shape = [*shape_of(x)[:-1], len(columns)]
    y = rewriter.op(
        "Linear",
        [x, *operands],
        shape,
        attrs=dict(linear.attrs),
        domain=CASTIRON,
        hint=f"{tensor.name}.linear",
    )
    return rewriter.reshape(y, ["T", len(columns)], f"{tensor.name}.rows")
