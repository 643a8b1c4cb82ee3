"""The graph's ``Unpack``: codes or scales out of the packed bytes of a quantized checkpoint."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from castiron.errors import BuildError

from .exprs import WeightExpr, piecewise
from .gguf_blocks import GGUF_LAYOUTS
from .layouts import TOOL_LAYOUTS, Layout

Array = npt.NDArray[Any]

#: Every layout by name.
LAYOUTS: Final[dict[str, Layout]] = {**TOOL_LAYOUTS, **GGUF_LAYOUTS}


class Unpack(WeightExpr):
    """Decodes raw rows piece by piece.

    Raises ``BuildError`` for an unknown layout and for a raw tensor of another dtype or shape than it has.
    """

    def __init__(self, raw: WeightExpr, layout: str) -> None:
        found = LAYOUTS.get(layout)
        if found is None:
            raise BuildError(f"weight {raw.name!r}: unknown layout {layout!r} of packed codes.")
        if raw.dtype.name not in found.raw:
            raise BuildError(
                f"weight {raw.name!r}: found {raw.dtype.name}, expected {' or '.join(found.raw)} for its "
                f"layout {layout}."
            )
        super().__init__(raw.name, found.shape(raw.shape), found.dtype)
        self._raw, self._layout = raw, found

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        ways = self._layout.rows_out
        widest = max(self._raw.row_elements * self._raw.dtype.itemsize, self.row_elements)
        for begin, end in piecewise(start, stop, widest):
            first, last = begin // ways, -(-end // ways)
            rows = self._layout.decode(self._raw.rows(first, last))
            out[begin - start : end - start] = rows[begin - first * ways : end - first * ways]


def unpack(raw: Array, layout: str) -> Array:
    """A whole raw array [.., C] decoded: what the graph's ``Unpack`` computes."""
    found = LAYOUTS[layout]
    shape = found.shape(raw.shape)
    return np.ascontiguousarray(found.decode(np.ascontiguousarray(raw))).reshape(shape)
