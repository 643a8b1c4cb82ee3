"""From weight expressions to the bytes that kernels read, chunk by chunk.

Layouts are those of ``engines/program.py``. Every stored tensor is a multiple of 64 bytes long, so that all
start on a cache line when they lie side by side in one file (``Packed.stored_shape``). Quantized weights are
packed by ``packing_quantized.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from castiron.errors import BuildError

from ..engines.program import Layout, WeightDType
from ..engines.weights_file import stored_shape
from ..graph.weights import WeightExpr
from .packed import CHUNK_BYTES, PANEL, Packed, as_bytes, panel_count

DTYPES: Final[dict[WeightDType, np.dtype[Any]]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}
_WIDER: Final[dict[WeightDType, str]] = {
    "bf16": "build with --dtype float32",
    "f16": "build with --dtype bfloat16",
    "f32": "no engine holds such a value: the checkpoint is damaged",
}
_PANEL_LAYOUT: Final[dict[WeightDType, Layout]] = {"f32": "panel16", "bf16": "panel16x2"}


class PackedSource(Packed):
    """A weight of floating-point numbers: where they come from and how they are laid out.

    Made by ``plain``, ``panels``, ``gated_panels`` and ``gated_vector``.
    """

    def __init__(
        self, name: str, parts: Sequence[WeightExpr], dtype: WeightDType, layout: Layout, shape: Sequence[int]
    ) -> None:
        super().__init__(name, dtype, layout, shape)
        self._target = DTYPES[dtype]
        # A bf16 target takes bf16 numbers as they are stored, whatever the graph computes in
        self._parts = tuple(part.without_upcast() for part in parts)

    @classmethod
    def plain(cls, name: str, expr: WeightExpr, dtype: WeightDType = "f32") -> PackedSource:
        """Row-major, shape as it is; a scalar is stored as [1]."""
        return cls(name, [expr], dtype, "plain", expr.shape or (1,))

    @classmethod
    def panels(cls, name: str, expr: WeightExpr, dtype: WeightDType) -> PackedSource:
        """A matrix [N, K] in panels of 16 output features: ``panel16`` for f32, ``panel16x2`` for bf16."""
        _require_matrix(name, expr)
        return cls(name, [expr], dtype, _PANEL_LAYOUT[dtype], expr.shape)

    @classmethod
    def gated_panels(cls, name: str, gate: WeightExpr, up: WeightExpr, dtype: WeightDType) -> PackedSource:
        """Two matrices [N, K] as one [2·ceil(N/16)·16, K]: a panel of gate, a panel of up, and so on."""
        _require_matrix(name, gate)
        _require_matrix(name, up)
        _require_equal_shapes(name, gate, up)
        rows = 2 * panel_count(gate.shape[0]) * PANEL
        return cls(name, [gate, up], dtype, _PANEL_LAYOUT[dtype], (rows, gate.shape[1]))

    @classmethod
    def gated_vector(cls, name: str, gate: WeightExpr, up: WeightExpr) -> PackedSource:
        """Two biases [N] as one f32 [2·ceil(N/16)·16] in the order of ``gated_panels``."""
        _require_equal_shapes(name, gate, up)
        if gate.ndim != 1:
            raise BuildError(f"weight {name!r}: found a bias of shape {list(gate.shape)}, expected [N].")
        return cls(name, [gate, up], "f32", "plain", (2 * panel_count(gate.shape[0]) * PANEL,))

    def chunks(self) -> Iterator[memoryview]:
        """See ``Packed.chunks``.

        Raises ``BuildError`` naming the tensor when a number does not fit the stored dtype or is not finite.
        """
        if self.layout != "plain":
            return self._panel_chunks()
        return self._gated_vector_chunks() if len(self._parts) == 2 else self._plain_chunks()

    # -- plain -----------------------------------------------------------------------------------------------

    def _plain_chunks(self) -> Iterator[memoryview]:
        (expr,) = self._parts
        if not expr.shape:
            yield as_bytes(np.pad(self._convert(expr.whole().reshape(1)), (0, self.stored_shape[0] - 1)))
            return
        reader = _RowReader(expr, self._target, CHUNK_BYTES)
        for begin in range(0, expr.shape[0], reader.step):
            yield as_bytes(self._convert(reader.read(begin, min(expr.shape[0], begin + reader.step))))
        if self.padding:
            yield memoryview(bytes(self.padding))

    def _gated_vector_chunks(self) -> Iterator[memoryview]:
        out = np.zeros((self.shape[0] // (2 * PANEL), 2, PANEL), np.float32)
        for index, part in enumerate(self._parts):
            padded = np.zeros(out.shape[0] * PANEL, np.float32)
            padded[: part.shape[0]] = self._convert(part.whole())
            out[:, index] = padded.reshape(-1, PANEL)
        yield as_bytes(out)

    # -- panels ----------------------------------------------------------------------------------------------

    def _panel_chunks(self) -> Iterator[memoryview]:
        rows, inputs = self._parts[0].shape
        ways = len(self._parts)
        panel_shape = stored_shape(self.weight)[1:]
        panel_bytes = int(np.prod(panel_shape, dtype=np.int64)) * self._target.itemsize
        blocks = panel_count(rows)
        step = max(1, min(blocks, CHUNK_BYTES // (panel_bytes * ways)))
        readers = [
            _RowReader(part, self._target, step * PANEL * part.row_elements * part.dtype.itemsize)
            for part in self._parts
        ]
        buffer = np.zeros((step, ways, *panel_shape), self._target)
        for begin in range(0, blocks, step):
            count = min(step, blocks - begin)
            first, last = begin * PANEL, min(rows, (begin + count) * PANEL)
            for way, reader in enumerate(readers):
                self._arrange(self._convert(reader.read(first, last)), buffer[:count, way], inputs)
            yield as_bytes(buffer[:count])

    def _arrange(self, matrix: npt.NDArray[Any], out: npt.NDArray[Any], inputs: int) -> None:
        """Lay rows [n, K] out as panels [ceil(n/16), K, 16] or [ceil(n/16), ceil(K/2), 16, 2]."""
        full, rest = divmod(matrix.shape[0], PANEL)
        for panel in range(
            full
        ):  # a panel at a time stays in the cache; twice as fast as one large transpose
            _transpose_panel(matrix[panel * PANEL : (panel + 1) * PANEL], out[panel], inputs)
        if rest:
            last = np.zeros((PANEL, inputs), matrix.dtype)
            last[:rest] = matrix[full * PANEL :]
            _transpose_panel(last, out[full], inputs)

    def _convert(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """To the stored dtype, round to nearest even; refuses what is not finite afterwards."""
        with np.errstate(over="ignore"):  # told below, with the tensor's name
            stored = rows.astype(self._target, copy=False)
        if not _all_finite(stored):
            if _all_finite(rows):
                worst = float(np.max(np.abs(rows.astype(np.float64))))
                raise BuildError(
                    f"weight {self.name!r} (from {self._parts[0].name}): found a value of magnitude "
                    f"{worst:.4g}, too large for {self._target.name}; {_WIDER[self.dtype]}."
                )
            raise BuildError(
                f"weight {self.name!r} (from {self._parts[0].name}): found NaN or infinity, expected finite "
                "values. The checkpoint is damaged: download it again."
            )
        return stored


class _RowReader:
    """Reads row ranges of an expression into one buffer that is used again."""

    def __init__(self, expr: WeightExpr, target: np.dtype[Any], limit: int) -> None:
        self._expr = expr
        widest = max(expr.dtype.itemsize, target.itemsize)
        self.step = max(1, min(expr.shape[0], limit // max(1, expr.row_elements * widest)))
        self._buffer = np.empty(0, expr.dtype)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows [start, stop), valid until the next call."""
        expr = self._expr
        count = (stop - start) * expr.row_elements
        if self._buffer.size < count:
            self._buffer = np.empty(count, expr.dtype)
        out = self._buffer[:count].reshape(stop - start, *expr.shape[1:])
        expr.fill(start, stop, out)
        return out


def _transpose_panel(rows: npt.NDArray[Any], out: npt.NDArray[Any], inputs: int) -> None:
    if out.ndim == 2:
        out[...] = rows.T
    elif inputs % 2 == 0:
        # A pair of neighbouring bf16 is moved as one 32-bit word
        out.view(np.uint32)[..., 0] = np.ascontiguousarray(rows).view(np.uint32).T
    else:
        out[: inputs // 2] = rows[:, :-1].reshape(PANEL, -1, 2).transpose(1, 0, 2)
        out[-1, :, 0] = rows[:, -1]
        out[-1, :, 1] = 0


def _all_finite(values: npt.NDArray[Any]) -> bool:
    if values.dtype.itemsize == 2 and values.dtype.name == "bfloat16" and values.size:
        # As integers: eight times faster than through ml_dtypes. An exponent of ones is infinity or NaN.
        return bool(np.bitwise_and(values.view(np.uint16), 0x7F80).max() != 0x7F80)
    return bool(np.isfinite(values).all())


def _require_matrix(name: str, expr: WeightExpr) -> None:
    if expr.ndim != 2 or 0 in expr.shape:
        raise BuildError(f"weight {name!r}: found shape {list(expr.shape)}, expected a matrix [N, K].")


def _require_equal_shapes(name: str, gate: WeightExpr, up: WeightExpr) -> None:
    if gate.shape != up.shape:
        raise BuildError(
            f"weight {name!r}: found gate {list(gate.shape)} and up {list(up.shape)}, expected equal shapes."
        )
