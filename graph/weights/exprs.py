"""The streaming rules behind ``WeightGraph``: one class per way of making rows from the rows of others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ..files import FileReader

if TYPE_CHECKING:
    from .parts import QuantizedParts

Array = npt.NDArray[Any]

#: How much of an operand is held at a time where an output needs all of it.
PIECE_BYTES: Final = 16 << 20


def piecewise(start: int, stop: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover rows ``[start, stop)`` in pieces of ``PIECE_BYTES`` at most (one row at least)."""
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    for begin in range(start, stop, step):
        yield begin, min(stop, begin + step)


class WeightExpr(ABC):
    """A tensor that is made on demand, rows ``[start, stop)`` of axis 0 at a time.

    ``shape`` and ``dtype`` are those of the value; ``name`` is the tensor it comes from, for messages.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.name = name
        self.shape = tuple(int(size) for size in shape)
        self.dtype = dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Size in bytes, were it all in memory."""
        return self.size * self.dtype.itemsize

    @property
    def row_elements(self) -> int:
        """Elements in one row of axis 0."""
        return int(np.prod(self.shape[1:], dtype=np.int64))

    def rows(self, start: int, stop: int) -> Array:
        """Rows ``[start, stop)`` as a new array [stop - start, ...]."""
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        self.fill(start, stop, out)
        return out

    def whole(self) -> Array:
        """The whole tensor, scalars too."""
        if not self.shape:
            return Reshape(self, (1,)).rows(0, 1).reshape(())
        return self.rows(0, self.shape[0])

    @abstractmethod
    def fill(self, start: int, stop: int, out: Array) -> None:
        """Write rows ``[start, stop)`` into ``out`` [stop - start, ...] of this dtype, contiguous or not.

        A scalar is filled as if it had the shape [1].
        """

    def without_upcast(self) -> WeightExpr:
        """The same numbers in the narrowest stored form: a cast that loses nothing is taken off.

        Packing bfloat16 weights then moves bytes instead of converting there and back.
        """
        return self

    def parts(self) -> QuantizedParts | None:
        """The codes and scales behind a quantized matrix; None where the value is no such thing.

        Operations that only move rows or columns move those of the parts.
        """
        return None


class Constant(WeightExpr):
    """A small tensor that is in memory already."""

    def __init__(self, name: str, value: Array) -> None:
        super().__init__(name, value.shape, value.dtype)
        self._value = value

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        out[...] = np.atleast_1d(self._value)[start:stop]


class Stored(WeightExpr):
    """A tensor in a file, C order from byte ``offset``."""

    def __init__(
        self,
        name: str,
        file: Path,
        offset: int,
        dtype: np.dtype[Any],
        shape: Sequence[int],
        files: FileReader,
    ) -> None:
        super().__init__(name, shape, dtype)
        self._file, self._offset, self._files = file, offset, files

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        target = out if out.flags.c_contiguous else np.empty(out.shape, self.dtype)
        offset = self._offset + start * self.row_elements * self.dtype.itemsize
        if target.size:
            self._files.read_into(self._file, offset, target)
        if target is not out:
            out[...] = target


#: Casts that keep every value: (from, to).
_LOSSLESS: Final = frozenset({("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32")})


class Cast(WeightExpr):
    """Another dtype."""

    def __init__(self, source: WeightExpr, dtype: np.dtype[Any]) -> None:
        super().__init__(source.name, source.shape, dtype)
        self._source = source

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        # Piecewise, so that the source rows never need as much memory as the result
        for begin, end in piecewise(start, stop, self._source.row_elements * self._source.dtype.itemsize):
            np.copyto(out[begin - start : end - start], self._source.rows(begin, end), casting="unsafe")

    def without_upcast(self) -> WeightExpr:
        """See ``WeightExpr.without_upcast``."""
        inner = self._source.without_upcast()
        return inner if (inner.dtype.name, self.dtype.name) in _LOSSLESS else self

    def parts(self) -> QuantizedParts | None:
        """See ``WeightExpr.parts``."""
        return self._source.parts() if self.dtype == self._source.dtype else None


class Concat(WeightExpr):
    """Tensors side by side along ``axis``; of several dtypes, in float32 or what is wider.

    A checkpoint may hold q_proj in bf16 and k_proj in f16, which one product takes side by side.
    """

    def __init__(self, parts: Sequence[WeightExpr], axis: int) -> None:
        if len({part.dtype for part in parts}) > 1:
            widest = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
            common = widest if widest.itemsize > 4 else np.dtype(np.float32)
            parts = [part if part.dtype == common else Cast(part, common) for part in parts]
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        super().__init__("+".join(part.name for part in parts), shape, parts[0].dtype)
        self._parts, self._axis = tuple(parts), axis

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        position = 0
        for part in self._parts:
            length = part.shape[self._axis]
            if self._axis == 0:
                begin, end = max(start, position), min(stop, position + length)
                if begin < end:
                    part.fill(begin - position, end - position, out[begin - start : end - start])
            else:
                index = (slice(None),) * self._axis + (slice(position, position + length),)
                part.fill(start, stop, out[index])
            position += length

    def without_upcast(self) -> WeightExpr:
        """See ``WeightExpr.without_upcast``."""
        parts = [part.without_upcast() for part in self._parts]
        return Concat(parts, self._axis) if len({part.dtype for part in parts}) == 1 else self

    def parts(self) -> QuantizedParts | None:
        """See ``WeightExpr.parts``."""
        from .parts import stacked

        return stacked([part.parts() for part in self._parts]) if self._axis == 0 else None


class Slice(WeightExpr):
    """A part of a tensor, one slice per axis."""

    def __init__(self, source: WeightExpr, slices: Sequence[slice]) -> None:
        self._ranges = [range(size)[cut] for size, cut in zip(source.shape, slices, strict=True)]
        super().__init__(source.name, [len(part) for part in self._ranges], source.dtype)
        self._source, self._slices = source, tuple(slices)

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        rows = self._ranges[0][start:stop]
        if not rows:
            return
        inner = self._slices[1:]
        whole_rows = all(
            part == range(size) for part, size in zip(self._ranges[1:], self._source.shape[1:], strict=True)
        )
        if rows.step == 1 and whole_rows:
            self._source.fill(rows[0], rows[-1] + 1, out)
            return
        low, high = min(rows), max(rows) + 1
        chosen = np.arange(rows.start, rows.stop, rows.step) - low
        out[...] = self._source.rows(low, high)[(slice(None), *inner)][chosen]

    def without_upcast(self) -> WeightExpr:
        """See ``WeightExpr.without_upcast``."""
        return Slice(self._source.without_upcast(), self._slices)

    def parts(self) -> QuantizedParts | None:
        """See ``WeightExpr.parts``."""
        found = self._source.parts()
        if found is None or self._ranges[1] != range(self._source.shape[1]):
            return None
        rows = self._slices[0]
        return found.with_rows(lambda part: Slice(part, (rows, slice(None))))


class Gather(WeightExpr):
    """Entries along ``axis`` picked by a list of indices."""

    def __init__(self, source: WeightExpr, indices: Array, axis: int) -> None:
        shape = [len(indices) if i == axis else size for i, size in enumerate(source.shape)]
        super().__init__(source.name, shape, source.dtype)
        self._source, self._indices, self._axis = source, indices, axis

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        if self._axis:
            out[...] = np.take(self._source.rows(start, stop), self._indices, self._axis)
            return
        wanted = self._indices[start:stop]
        if not len(wanted):
            return
        breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
        low, high = int(wanted.min()), int(wanted.max()) + 1
        held = (high - low) * self.row_elements * self.dtype.itemsize
        # Short runs close together (a permutation inside heads, a scale for many rows) are one read
        if len(breaks) > len(wanted) // 16 and (high - low <= 2 * len(wanted) or held <= PIECE_BYTES):
            out[...] = self._source.rows(low, high)[wanted - low]
            return
        for run in np.split(np.arange(len(wanted)), breaks):
            first = int(wanted[run[0]])
            self._source.fill(first, first + len(run), out[run[0] : run[-1] + 1])

    def without_upcast(self) -> WeightExpr:
        """See ``WeightExpr.without_upcast``."""
        return Gather(self._source.without_upcast(), self._indices, self._axis)

    def parts(self) -> QuantizedParts | None:
        """See ``WeightExpr.parts``."""
        found = self._source.parts()
        if found is None or self._axis:
            return None if found is None else found.with_columns(self._indices)
        return found.with_rows(lambda part: Gather(part, self._indices, 0))


class Transpose(WeightExpr):
    """Axes in another order. Rows of the result need all of the source, which is read piece by piece."""

    def __init__(self, source: WeightExpr, perm: Sequence[int]) -> None:
        self._perm = tuple(perm)
        super().__init__(source.name, [source.shape[axis] for axis in self._perm], source.dtype)
        self._source = source

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        if self._perm[0] == 0:
            out[...] = self._source.rows(start, stop).transpose(self._perm)
            return
        outer = self._perm.index(0)  # where the source's rows end up
        cut: list[slice] = [slice(None)] * self.ndim
        cut[self._perm[0]] = slice(start, stop)
        place: list[slice] = [slice(None)] * self.ndim
        row_bytes = self._source.row_elements * self.dtype.itemsize
        for begin, end in piecewise(0, self._source.shape[0], row_bytes):
            piece = self._source.rows(begin, end)
            place[outer] = slice(begin, end)
            out[tuple(place)] = piece[tuple(cut)].transpose(self._perm)

    def without_upcast(self) -> WeightExpr:
        """See ``WeightExpr.without_upcast``."""
        return Transpose(self._source.without_upcast(), self._perm)

    def parts(self) -> QuantizedParts | None:
        """See ``WeightExpr.parts``. A transpose that undoes another is none."""
        inner = _unmoved(self)
        return None if inner is self else inner.parts()


class Reshape(WeightExpr):
    """The same elements in C order under another shape."""

    def __init__(self, source: WeightExpr, shape: Sequence[int]) -> None:
        super().__init__(source.name, shape, source.dtype)
        self._source = source

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        source = self._source
        first, last = start * self.row_elements, stop * self.row_elements
        if first == last:
            return
        width = source.row_elements
        begin, end = first // width, -(-last // width)
        if out.flags.c_contiguous and (first, last) == (begin * width, end * width):
            source.fill(begin, end, out.reshape((end - begin, *source.shape[1:])))
            return
        flat = source.rows(begin, end).reshape(-1)
        out[...] = flat[first - begin * width : last - begin * width].reshape(out.shape)

    def without_upcast(self) -> WeightExpr:
        """See ``WeightExpr.without_upcast``."""
        return Reshape(self._source.without_upcast(), self.shape)

    def parts(self) -> QuantizedParts | None:
        """See ``WeightExpr.parts``."""
        inner = _unmoved(self._source)
        return inner.parts() if self.shape == inner.shape else None


def _unmoved(expr: WeightExpr) -> WeightExpr:
    """What an expression is once reshapes, and transposes that undo each other, are taken off."""
    while True:
        if isinstance(expr, Reshape):
            expr = expr._source
        elif isinstance(expr, Transpose) and isinstance(expr._source, Transpose):
            inner = expr._source
            if [inner._perm[axis] for axis in expr._perm] != list(range(expr.ndim)):
                return expr
            expr = inner._source
        else:
            return expr


def pick_rows(w: Array, *, experts: int, start: int, step: int, count: int) -> Array:
    """Rows start, start + step, ... (``count`` of them) of each of ``experts`` arrays that lie one below the
    other in w [experts·N, ...]: [experts·count, ...].
    """
    each: Array = w.reshape(experts, -1, *w.shape[1:])[:, start : start + step * (count - 1) + 1 : step]
    return each.reshape(experts * count, *w.shape[1:])


class PickedRows(WeightExpr):
    """See ``pick_rows``."""

    def __init__(self, source: WeightExpr, experts: int, start: int, step: int, count: int) -> None:
        super().__init__(source.name, (experts * count, *source.shape[1:]), source.dtype)
        self._source, self._height, self._count = source, source.shape[0] // experts, count
        self._options = {"experts": experts, "start": start, "step": step, "count": count}
        if start + step * (count - 1) >= self._height:
            raise ValueError(f"{source.name}: row {start + step * (count - 1)} of {self._height}")

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        step, place = self._options["step"], start
        while place < stop:
            expert, first = divmod(place, self._count)
            count = min(self._count - first, stop - place)
            begin = expert * self._height + self._options["start"] + step * first
            target = out[place - start : place - start + count]
            if step == 1:
                self._source.fill(begin, begin + count, target)
            else:
                target[...] = self._source.rows(begin, begin + step * (count - 1) + 1)[::step]
            place += count

    def without_upcast(self) -> WeightExpr:
        """See ``WeightExpr.without_upcast``."""
        return PickedRows(self._source.without_upcast(), **self._options)

    def parts(self) -> QuantizedParts | None:
        """See ``WeightExpr.parts``."""
        found = self._source.parts()
        return None if found is None else found.with_rows(lambda part: PickedRows(part, **self._options))


#: Rows of a panel of the host's layouts (engines/program.py).
_PANEL: Final = 16


def panelled(expr: WeightExpr, matrices: int) -> WeightExpr:
    """``matrices`` equal ones that lie one below the other in ``expr``, with zeros behind each that fill its
    last panel."""
    if matrices == 1 or expr.shape[0] // matrices % _PANEL == 0:
        return expr
    return Panelled(expr, matrices)


class Panelled(WeightExpr):
    """Matrices with zeros behind each: see ``panelled``."""

    def __init__(self, source: WeightExpr, matrices: int) -> None:
        self._height = source.shape[0] // matrices
        self._step = -(-self._height // _PANEL) * _PANEL
        super().__init__(source.name, (matrices * self._step, *source.shape[1:]), source.dtype)
        self._source, self._matrices = source, matrices

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        out[...] = np.zeros((), self.dtype)
        for index in range(start // self._step, -(-stop // self._step)):
            first = index * self._step
            begin, end = max(start, first), min(stop, first + self._height)
            if begin < end:
                shift = index * (self._step - self._height)
                self._source.fill(begin - shift, end - shift, out[begin - start : end - start])

    def without_upcast(self) -> WeightExpr:
        """See ``WeightExpr.without_upcast``."""
        return Panelled(self._source.without_upcast(), self._matrices)

    def parts(self) -> QuantizedParts | None:
        """See ``WeightExpr.parts``."""
        found = self._source.parts()
        return None if found is None else found.with_rows(lambda part: Panelled(part, self._matrices))


class Elementwise(WeightExpr):
    """A numpy function of one or two tensors, with broadcasting."""

    def __init__(self, function: np.ufunc, operands: Sequence[WeightExpr]) -> None:
        shape = np.broadcast_shapes(*(operand.shape for operand in operands))
        super().__init__(operands[0].name, shape, operands[0].dtype)
        self._function, self._operands = function, tuple(operands)

    def fill(self, start: int, stop: int, out: Array) -> None:
        """See ``WeightExpr.fill``."""
        function: Any = self._function
        out[...] = function(*(self._operand_rows(operand, start, stop) for operand in self._operands))

    def _operand_rows(self, operand: WeightExpr, start: int, stop: int) -> Array:
        if operand.ndim < self.ndim or (operand.shape and operand.shape[0] != self.shape[0]):
            return operand.whole()  # broadcast along axis 0
        return operand.rows(start, stop)
