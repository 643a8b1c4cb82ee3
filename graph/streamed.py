"""Parameters that stay on disk: torch layers run over them while rows are read piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from castiron.errors import UnsupportedModelError

from .checkpoint import Checkpoint, Tensor

#: Stored bytes read at a time; widened to float32 they take two to four times as much.
_PIECE_BYTES: Final = 32 << 20


def as_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    """The same memory as a tensor; torch does not know numpy's bfloat16."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def read_float32(checkpoint: Checkpoint, tensor: Tensor) -> torch.Tensor:
    """A whole stored tensor in float32, widened piece by piece."""
    out = torch.empty(tensor.shape, dtype=torch.float32)
    if not tensor.shape:
        return out.copy_(as_torch(checkpoint.read(tensor.name)))
    for start, stop in checkpoint.row_chunks(tensor.name, _PIECE_BYTES):
        out[start:stop] = as_torch(checkpoint.read(tensor.name, start, stop))
    return out


class StreamedParameter(nn.Parameter):
    """A float32 parameter whose numbers stay in the checkpoint.

    ``linear``, ``embedding`` and ``addmm`` (Conv1D) over it, and picking one expert's matrix, read the rows
    they need; shape, dtype and device can be asked for. Any other use is an error, never a silent computation
    on empty memory.
    """

    checkpoint: Checkpoint
    stored: Tensor

    @staticmethod
    def over(checkpoint: Checkpoint, stored: Tensor) -> StreamedParameter:
        """The parameter of a stored tensor."""
        # One number seen through zero strides: right shape and device, no memory
        empty = torch.empty(1).as_strided(stored.shape, (0,) * len(stored.shape))
        parameter = torch.Tensor._make_subclass(StreamedParameter, empty, False)
        parameter.checkpoint = checkpoint
        parameter.stored = stored
        return parameter

    def pieces(self) -> Any:
        """Yields (start, stop, rows in float32); the rows are valid until the next piece."""
        rows = self.stored.shape[0]
        row_bytes = self.stored.nbytes // rows
        step = min(rows, max(1, _PIECE_BYTES // row_bytes))
        buffer = np.empty((step, *self.stored.shape[1:]), self.stored.dtype)
        wide = torch.empty(buffer.shape, dtype=torch.float32)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            piece = wide[: stop - start]
            piece.copy_(as_torch(self.checkpoint.read(self.stored.name, start, stop, out=buffer)))
            yield start, stop, piece

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Routes operations that can be streamed, lets questions about the form pass, refuses the rest."""
        with torch._C.DisableTorchFunctionSubclass():
            rule = _RULES.get(func)
            if rule is _pick and not _is_number(args[1]):
                rule = None
            if rule is not None:
                return rule(*args, **(kwargs or {}))
            name = getattr(func, "__name__", str(func))
            if name in _QUESTIONS:
                return func(*args, **(kwargs or {}))
        raise UnsupportedModelError(
            f"the reference model uses torch's {name!r} on a weight that is too large to load; expected "
            "linear, embedding or addmm. Build on a machine with memory for the whole model in float32."
        )


def _linear(x: torch.Tensor, weight: StreamedParameter, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty((*x.shape[:-1], weight.shape[0]))
    for start, stop, rows in weight.pieces():
        out[..., start:stop] = functional.linear(x, rows, None if bias is None else bias[start:stop])
    return out


def _embedding(ids: torch.Tensor, weight: StreamedParameter, *_: Any, **__: Any) -> torch.Tensor:
    checkpoint, name = weight.checkpoint, weight.stored.name
    unique, inverse = torch.unique(ids, return_inverse=True)
    rows = torch.empty((len(unique), weight.shape[1]))
    for row, token in zip(rows, unique.tolist(), strict=True):
        row.copy_(as_torch(checkpoint.read(name, token, token + 1))[0])
    return rows[inverse]


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: StreamedParameter) -> torch.Tensor:
    out = bias.expand(x.shape[0], weight.shape[1]).clone()
    for start, stop, rows in weight.pieces():
        out.addmm_(x[:, start:stop], rows)
    return out


def _is_number(index: Any) -> bool:
    return isinstance(index, int) or (isinstance(index, torch.Tensor) and index.dim() == 0)


def _pick(stack: StreamedParameter, index: torch.Tensor | int) -> torch.Tensor:
    """One entry along the first axis: the matrix, or the bias, of one expert."""
    number = int(index)
    entry = torch.empty(stack.shape[1:])
    entry.copy_(as_torch(stack.checkpoint.read(stack.stored.name, number, number + 1))[0])
    return entry


_RULES: Final[Mapping[Callable[..., Any], Callable[..., torch.Tensor]]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    torch.addmm: _addmm,
    torch.Tensor.__getitem__: _pick,
}
#: Functions that ask for a parameter's form (attributes come as their getter's ``__get__``).
_QUESTIONS: Final = frozenset({"__get__", "size", "dim", "numel", "is_floating_point", "type", "__repr__"})
