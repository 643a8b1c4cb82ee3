"""Which quantized tensor of a GGUF file is which parameter, told by the numbers themselves.

Architectures store rows of projections in orders of their own (llama.cpp permutes the heads' rows for its
rotary embedding, Bloom splits q, k and v). Instead of a list of such rules, a parameter's rows are looked up
among the dequantized rows of the file: equal to the last bit, or the parameter stays as it was loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..weights.gguf_blocks import BLOCK_KINDS
from .quantized.gguf import Blocks

_SEED: Final = 11


def find_blocks(file: Path, parameters: Mapping[str, Any]) -> tuple[dict[str, Blocks], list[list[int]]]:
    """The blocks of every matrix of ``parameters`` (torch tensors, float32) that the file holds as blocks.

    Also gives the orders of rows that ``Blocks.order`` counts.
    """
    import gguf

    wanted: dict[tuple[int, ...], list[str]] = defaultdict(list)
    ours: dict[str, _Matrix] = {}
    for name, tensor in parameters.items():
        if tensor.ndim == 2:
            wanted[tuple(tensor.shape)].append(name)
            ours[name] = _Matrix.of(tensor.numpy())
    found: dict[str, Blocks] = {}
    orders: dict[tuple[int, ...], int] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        kind, shape = tensor.tensor_type.name, tuple(int(size) for size in reversed(tensor.shape))
        if kind not in BLOCK_KINDS or not wanted.get(shape):
            continue
        theirs = _Matrix.of(np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32))
        for name in wanted[shape]:
            order = _order_of(ours[name], theirs)
            if order is None:
                continue
            plain = bool((order == np.arange(len(order))).all())
            index = None if plain else orders.setdefault(tuple(order.tolist()), len(orders))
            found[name] = Blocks(str(tensor.name), kind, int(tensor.data_offset), (shape[0], shape[1]), index)
            wanted[shape].remove(name)
            break
    return found, [list(order) for order in orders]


class _Matrix(NamedTuple):
    rows: npt.NDArray[Any]
    signatures: npt.NDArray[np.uint64]  # a number for each row: equal for equal rows, and hardly for others

    @classmethod
    def of(cls, rows: npt.NDArray[Any]) -> _Matrix:
        return cls(rows, _signatures(rows))


def _order_of(ours: _Matrix, theirs: _Matrix) -> npt.NDArray[Any] | None:
    """For each row of ours the row of theirs that equals it; None if one has no equal."""
    if np.array_equal(ours.signatures, theirs.signatures) and np.array_equal(ours.rows, theirs.rows):
        return np.arange(len(ours.rows))
    by_signature = np.argsort(theirs.signatures, kind="stable")
    places = np.searchsorted(theirs.signatures, ours.signatures, sorter=by_signature)
    order: npt.NDArray[Any] = by_signature[np.minimum(places, len(by_signature) - 1)]
    if not np.array_equal(theirs.signatures[order], ours.signatures):
        return None
    return order if np.array_equal(theirs.rows[order], ours.rows) else None


def _signatures(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    factors = np.random.default_rng(_SEED).integers(1, 1 << 63, rows.shape[1], np.uint64) | np.uint64(1)
    words = np.ascontiguousarray(rows).view(np.uint32)
    out = np.empty(len(rows), np.uint64)
    for row in range(0, len(rows), 1024):
        piece = words[row : row + 1024].astype(np.uint64) * factors  # wraps, as it should
        out[row : row + 1024] = piece.sum(1, dtype=np.uint64)
    return out
