"""What every stored weight has in common: its entry of program.json and its shape in rank0.safetensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..engines.program import Layout, Weight, WeightDType
from ..engines.weights_file import CODES, stored_shape

#: A chunk stays below this, one panel of 16 rows at least. Two buffers of the size are alive while packing.
CHUNK_BYTES: Final = 16 << 20
ALIGNMENT: Final = 64
#: Output features side by side in a panel.
PANEL: Final = 16


class Packed(ABC):
    """One stored weight.

    ``shape``         logical shape, as in program.json
    ``stored_shape``  shape in rank0.safetensors
    ``nbytes``        size in rank0.safetensors, a multiple of 64
    """

    def __init__(self, name: str, dtype: WeightDType, layout: Layout, shape: Sequence[int]) -> None:
        self.name = name
        self.dtype: WeightDType = dtype
        self.layout: Layout = layout
        self.shape = tuple(shape)

    @property
    def weight(self) -> Weight:
        """The entry of program.json."""
        return Weight(name=self.name, dtype=self.dtype, layout=self.layout, shape=list(self.shape))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the layout; flat, with zeros behind it, where that is no multiple of 64 bytes."""
        shape = stored_shape(self.weight)
        size, item = math.prod(shape), CODES[self.dtype][1]
        if size * item % ALIGNMENT == 0:
            return shape
        step = ALIGNMENT // item
        return (-(-size // step) * step,)

    @property
    def nbytes(self) -> int:
        """Bytes in rank0.safetensors."""
        return math.prod(self.stored_shape) * CODES[self.dtype][1]

    @property
    def padding(self) -> int:
        """Zero bytes behind the layout's own."""
        return self.nbytes - math.prod(stored_shape(self.weight)) * CODES[self.dtype][1]

    @abstractmethod
    def chunks(self) -> Iterator[memoryview]:
        """The stored bytes in order, in pieces of ``CHUNK_BYTES`` at most (one panel at least).

        A piece is valid until the next one is taken: buffers are reused.
        """


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """The memory of an array; a copy where it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def panel_count(rows: int) -> int:
    """Panels of 16 rows that hold ``rows``."""
    return -(-rows // PANEL)
