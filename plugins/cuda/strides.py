"""Sizes and strides of generic kernels as *codes*, and the axes that they can do without.

A code is a number c >= 0, or -c for c times the count of the one symbol that an op's shapes may name.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..launch import Grid, Param
from ..tactic import Context, Dims
from .types import blocks_over, count

#: Elements of a block of the elementwise kernels.
BLOCK = 1024
Codes = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """The elements that a kernel walks, and where each operand has them.

    Attributes:
        sizes: of the axes, outermost first. strides: of each operand, in elements.
        total: product of the sizes.
    """

    sizes: Codes
    strides: tuple[Codes, ...]
    total: int


def symbol_of(*shapes: Dims) -> str | None:
    """The symbol that the shapes name, or None. `describable` refuses shapes with two different ones."""
    return next((dim for shape in shapes for dim in shape if isinstance(dim, str)), None)


def describable(*shapes: Dims) -> bool:
    """Whether codes can describe the shapes: one symbol in all, and once in each."""
    symbols = [[dim for dim in shape if isinstance(dim, str)] for shape in shapes]
    return len({dim for found in symbols for dim in found}) <= 1 and all(len(found) <= 1 for found in symbols)


def product(a: int, b: int) -> int:
    """The code of a product; at most one factor counts the symbol."""
    return a * b if a >= 0 or b >= 0 else _refuse()


def sizes_of(shape: Dims) -> Codes:
    """Codes of a shape."""
    return tuple(-1 if isinstance(dim, str) else dim for dim in shape)


def strides_of(sizes: Codes) -> Codes:
    """Row-major strides."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(product(strides[-1], size))
    return tuple(reversed(strides[: len(sizes)]))


def broadcast_strides(shape: Dims, to: Dims) -> Codes:
    """Strides of an operand that numpy's rules repeat to the shape ``to``: 0 along what is repeated."""
    own = sizes_of(shape)
    missing = len(to) - len(own)
    return (0,) * missing + tuple(
        0 if size == 1 else stride for size, stride in zip(own, strides_of(own), strict=True)
    )


def box(sizes: Codes, *operands: Codes) -> Box:
    """The same walk with as few axes as possible: neighbours join where every operand allows it."""
    total = 1
    for size in sizes:
        total = product(total, size)
    axes: list[tuple[int, list[int]]] = []
    for size, *strides in zip(sizes, *operands, strict=True):
        if size == 1:
            continue
        if axes and all(
            outer == product(inner, size) for outer, inner in zip(axes[-1][1], strides, strict=True)
        ):
            axes[-1] = (product(axes[-1][0], size), strides)
        else:
            axes.append((size, strides))
    if not axes:
        axes = [(1, [0] * len(operands))]
    joined = tuple(zip(*(strides for _, strides in axes), strict=True))
    return Box(tuple(size for size, _ in axes), joined, total)


def is_wide(total: int, context: Context) -> bool:
    """Whether flat indices over ``total`` elements need 64 bits in the largest step."""
    most = max(context.limits.max_num_tokens, context.limits.max_logit_rows)
    return (total if total >= 0 else -total * most) >= 1 << 31


def walk_grid(total: int, symbol: str | None) -> Grid:
    """Blocks that cover ``total`` elements, BLOCK each."""
    if total >= 0 or symbol is None:
        return Grid(times=-(-total // BLOCK))
    width = -total
    # Several short rows share a block; a long row takes several blocks.
    per = max(1, BLOCK // width)
    return blocks_over(symbol, per, -(-per * width // BLOCK))


def symbol_count(symbol: str | None) -> Param:
    """The argument ``n`` of generic kernels."""
    return Param("i32", 1) if symbol is None else count(symbol)


def _refuse() -> int:
    raise ValueError("a generic kernel's shape names a symbol twice; `describable` must exclude it")
