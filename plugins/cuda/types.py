"""Small shared vocabulary of the CUDA tactics: Triton types, row counts, and grids over them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from ..launch import Grid, Param, size
from ..tactic import Dim, Dims

_POINTERS: Mapping[str, str] = {
    "f32": "*fp32",
    "bf16": "*bf16",
    "f16": "*fp16",
    "i32": "*i32",
    "i8": "*i8",
    "u8": "*u8",
    "f8e4m3": "*fp8e4nv",
}
_SYMBOLS: Mapping[str, Literal["T", "N", "S", "D", "P"]] = {"T": "T", "N": "N", "S": "S", "D": "D", "P": "P"}


def pointer(dtype: str) -> str:
    """Triton's type of an address of ``dtype`` elements."""
    return _POINTERS[dtype]


def count(dim: Dim) -> Param:
    """A size as a launch argument: the step's count of a symbol, or the number."""
    return size(_SYMBOLS[dim]) if isinstance(dim, str) else Param("i32", dim)


def blocks_over(dim: Dim, per: int, times: int = 1, per_sm: int = 0) -> Grid:
    """``times * ceil(dim / per)`` blocks, at most ``per_sm`` a multiprocessor if not 0."""
    if isinstance(dim, str):
        return Grid(_SYMBOLS[dim], per, times, per_sm)
    return Grid(None, 1, times * -(-dim // per), per_sm)


def blocks_for_each(shape: Dims) -> Grid:
    """One block for each element of ``shape``, of which one size at most is symbolic."""
    symbolic = [dim for dim in shape if isinstance(dim, str)]
    times = math.prod(dim for dim in shape if isinstance(dim, int))
    return blocks_over(symbolic[0], 1, times) if symbolic else Grid(times=times)


def symbol(dim: str) -> Literal["T", "N", "S", "D", "P"]:
    """The symbol of a symbolic size."""
    return _SYMBOLS[dim]


def next_power_of_two(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()
