"""Codes and scales of quantized matrices, in the layouts of ``engines/program.py``, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from castiron.errors import BuildError

from ..engines.program import Layout, WeightDType
from ..engines.weights_file import WORD_RUNS
from ..graph.weights import QuantizedParts, WeightExpr
from .block_scales import e4m3_scales, e8m0_scales
from .packed import CHUNK_BYTES, PANEL, Packed, as_bytes, panel_count

Array = npt.NDArray[Any]

#: What a program calls the codes of each weight format.
CODE_DTYPES: Final[dict[str, WeightDType]] = {"int8": "i8", "int4": "i4", "fp8": "f8e4m3", "fp4": "f4e2m1"}
NVFP4_GROUP: Final = 16
#: What a half byte of padding, or of a code, is counted from.
_ZERO: Final[dict[WeightDType, int]] = {"i4": 8, "f4e2m1": 0}


class CodeSource(Packed):
    """Codes of a matrix [N, K] (``parts``: one), or of a gate and an up projection.

    In panels a panel of gate and a panel of up take turns; in rows gate's come first and up's follow.
    """

    def __init__(self, name: str, parts: Sequence[QuantizedParts], *, panels: bool) -> None:
        self._codes = [part.codes for part in parts]
        dtype = CODE_DTYPES[parts[0].format]
        self._halves = dtype in _ZERO
        layout: Layout = "panel16x4n" if self._halves else "panel16x4"
        if not panels:
            layout = "words" if self._halves else "plain"
        super().__init__(name, dtype, layout, _shape(name, self._codes, panels=panels))

    def chunks(self) -> Iterator[memoryview]:
        """See ``Packed.chunks``."""
        if self.layout in ("plain", "words"):
            yield from _row_chunks(self._codes, self._words if self._halves else as_bytes)
        else:
            yield from _panel_chunks(self._codes, self.shape[1], self._panels)
        if self.padding:
            yield memoryview(bytes(self.padding))

    def _words(self, codes: Array) -> memoryview:
        """Rows [n, K] of half bytes in words."""
        run = WORD_RUNS[self.dtype]
        inputs = self._nibbles(codes, run).reshape(len(codes), -1, 4, run // 8, 2)
        # Input i·R/4 + 2j + p: half byte 4p + i of word j, that is half i % 2 of byte 2p + i // 2.
        low, high = inputs.transpose(0, 1, 3, 4, 2).reshape(len(codes), -1, 2).transpose(2, 0, 1)
        return as_bytes(low | (high << np.uint8(4)))

    def _panels(self, codes: Array) -> Array:
        """Rows [16 n, K] as [n, ...] in the panel layout."""
        if not self._halves:
            return _quads(_padded_columns(codes.view(np.uint8), 4, 0))
        quads = _quads(self._nibbles(codes, 4))  # [n, K/4, 16, 4]
        low, high = quads[:, :, :8], quads[:, :, 8:]
        packed: Array = low | (high << np.uint8(4))
        return packed.reshape(*quads.shape[:2], 32)

    def _nibbles(self, codes: Array, multiple: int) -> Array:
        zero = np.uint8(_ZERO[self.dtype])
        return _padded_columns((codes.view(np.uint8) + zero) & np.uint8(15), multiple, int(zero))


class ScaleSource(Packed):
    """Scales, or offsets, [N, G] of one matrix or of gate and up, arranged as ``CodeSource`` does.

    Numbers that the checkpoint or the plan holds as float16 stay so, unless ``wide``.
    """

    def __init__(self, name: str, scales: Sequence[WeightExpr], *, panels: bool, wide: bool = False) -> None:
        self._scales = [scale.without_upcast() for scale in scales]
        is_half = not wide and all(stored_dtype(scale) == "f16" for scale in scales)
        dtype: WeightDType = "f16" if is_half else "f32"
        self._target = np.dtype(np.float16 if dtype == "f16" else np.float32)
        layout: Layout = "panel16" if panels else "plain"
        super().__init__(name, dtype, layout, _shape(name, self._scales, panels=panels))

    def chunks(self) -> Iterator[memoryview]:
        """See ``Packed.chunks``; BuildError where a scale is not finite."""
        if self.layout == "plain":
            yield from _row_chunks(self._scales, lambda rows: as_bytes(self._checked(rows)))
        else:
            yield from _panel_chunks(self._scales, self.shape[1], self._panels)
        if self.padding:
            yield memoryview(bytes(self.padding))

    def _panels(self, rows: Array) -> Array:
        return self._checked(rows).reshape(-1, PANEL, rows.shape[1]).transpose(0, 2, 1)

    def _checked(self, rows: Array) -> Array:
        if not np.isfinite(rows).all():
            raise BuildError(
                f"weight {self.name!r}: a scale is NaN or infinite; expected finite values. The checkpoint "
                "is damaged, or its quantization overflowed: quantize or download it again."
            )
        return rows.astype(self._target, copy=False)


class BlockScaleSource(Packed):
    """The scales of float4 codes in the bytes of their format, [N, G] for each part, rows below each other:
    e4m3 where 16 inputs share one (NVFP4), else e8m0 (MX).
    """

    def __init__(self, name: str, parts: Sequence[QuantizedParts]) -> None:
        self._scales = [part.scale for part in parts]
        self._e4m3 = parts[0].group == NVFP4_GROUP
        super().__init__(name, "u8", "plain", _shape(name, self._scales, panels=False))

    def chunks(self) -> Iterator[memoryview]:
        """See ``Packed.chunks``; BuildError where the scales are not of the format."""
        convert = (lambda rows: e4m3_scales(rows)[0]) if self._e4m3 else e8m0_scales
        yield from _row_chunks(self._scales, lambda rows: as_bytes(convert(rows)))
        if self.padding:
            yield memoryview(bytes(self.padding))


class RowScaleSource(Packed):
    """What e4m3 block scales are multiplied by, f32 [N] for each part."""

    def __init__(self, name: str, parts: Sequence[QuantizedParts]) -> None:
        self._scales = [part.scale for part in parts]
        super().__init__(name, "f32", "plain", [sum(scale.shape[0] for scale in self._scales)])

    def chunks(self) -> Iterator[memoryview]:
        """See ``Packed.chunks``."""
        yield from _row_chunks(self._scales, lambda rows: as_bytes(e4m3_scales(rows)[1]))
        if self.padding:
            yield memoryview(bytes(self.padding))


def stored_dtype(scale: WeightExpr) -> Literal["f32", "f16"]:
    """What scales or offsets are packed as: float16 where that is what the numbers come from."""
    return "f16" if scale.without_upcast().dtype == np.float16 else "f32"


class ColumnSource(Packed):
    """Which input each column of codes multiplies, i32 [K]."""

    def __init__(self, name: str, columns: Array) -> None:
        self._columns = np.ascontiguousarray(columns, np.int32)
        super().__init__(name, "i32", "plain", self._columns.shape)

    def chunks(self) -> Iterator[memoryview]:
        """See ``Packed.chunks``."""
        yield as_bytes(self._columns)
        if self.padding:
            yield memoryview(bytes(self.padding))


def _shape(name: str, parts: Sequence[WeightExpr], *, panels: bool) -> tuple[int, int]:
    if any(part.ndim != 2 or part.shape != parts[0].shape for part in parts):
        found = " and ".join(str(list(part.shape)) for part in parts)
        raise BuildError(f"weight {name!r}: found shapes {found}, expected equal matrices")
    rows, columns = parts[0].shape
    if len(parts) == 1:
        return rows, columns
    return (2 * panel_count(rows) * PANEL if panels else 2 * rows), columns


def _row_chunks(parts: Sequence[WeightExpr], convert: Any) -> Iterator[memoryview]:
    for part in parts:
        step = max(1, CHUNK_BYTES // max(1, part.row_elements * 4))
        for begin in range(0, part.shape[0], step):
            yield convert(part.rows(begin, min(part.shape[0], begin + step)))


def _panel_chunks(parts: Sequence[WeightExpr], width: int, arrange: Any) -> Iterator[memoryview]:
    """Blocks of panels, the parts' taking turns; ``arrange`` makes [n, ...] of rows [16 n, K]."""
    rows = parts[0].shape[0]
    blocks = panel_count(rows)
    step = max(1, CHUNK_BYTES // (PANEL * width * 4 * len(parts)))
    for begin in range(0, blocks, step):
        first, last = begin * PANEL, min(rows, (begin + step) * PANEL)
        arranged = [arrange(_padded_rows(part.rows(first, last))) for part in parts]
        yield as_bytes(np.stack(arranged, 1))


def _padded_rows(rows: Array) -> Array:
    missing = -len(rows) % PANEL
    return np.pad(rows, ((0, missing), (0, 0))) if missing else np.ascontiguousarray(rows)


def _padded_columns(rows: Array, multiple: int, value: int) -> Array:
    missing = -rows.shape[1] % multiple
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=value) if missing else rows


def _quads(rows: Array) -> Array:
    """[16 n, K] as [n, K/4, 16, 4]."""
    return rows.reshape(-1, PANEL, rows.shape[1] // 4, 4).transpose(0, 2, 1, 3)
