"""``rank0.safetensors``: what it holds, and a distrustful reader of its header.

A plain safetensors file with two promises on top: tensor data starts at a multiple of 64 bytes, and every
tensor's size is a multiple of 64 bytes; so each tensor is 64-byte aligned in the file and in a mapping of it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castiron.errors import EngineError

from .files import open_regular, read_exact
from .program import Weight

ALIGNMENT = 64
MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1 << 20
#: By a weight's dtype: the dtype that the file names, and bytes of one of its elements. Codes of four bits
#: are bytes to the file.
CODES = {
    "f32": ("F32", 4),
    "bf16": ("BF16", 2),
    "f16": ("F16", 2),
    "i32": ("I32", 4),
    "i8": ("I8", 1),
    "u8": ("U8", 1),
    "f8e4m3": ("F8_E4M3", 1),
    "i4": ("U8", 1),
    "f4e2m1": ("U8", 1),
}
#: What each layout but the plain one may hold; codes of four bits are never plain.
MATRIX_DTYPES: Mapping[str, tuple[str, ...]] = {
    "words": ("i4", "f4e2m1"),
    "panel16": ("f32", "f16"),
    "panel16x2": ("bf16",),
    "panel16x4": ("i8", "f8e4m3"),
    "panel16x4n": ("i4", "f4e2m1"),
}
#: Inputs of a run of layout "words".
WORD_RUNS: Mapping[str, int] = {"i4": 32, "f4e2m1": 16}
_SIZES = dict(CODES.values())


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: ``offset`` from the start of the file, both numbers in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def layout_bytes(weight: Weight) -> int:
    """Return the bytes that ``weight`` takes in its layout (docs/program.md), before padding to 64."""
    return math.prod(stored_shape(weight)) * CODES[weight.dtype][1]


def stored_shape(weight: Weight) -> tuple[int, ...]:
    """Return the shape of ``weight`` as it lies in its layout, in elements that the file knows."""
    if weight.layout == "plain":
        return tuple(weight.shape)
    rows, columns = weight.shape
    if weight.layout == "words":
        run = WORD_RUNS[weight.dtype]
        return (rows, -(-columns // run), run // 2)
    panels = -(-rows // 16)
    if weight.layout == "panel16":
        return (panels, columns, 16)
    if weight.layout == "panel16x2":
        return (panels, -(-columns // 2), 16, 2)
    return (panels, -(-columns // 4), *((32,) if weight.layout == "panel16x4n" else (16, 4)))


def read_header(path: Path, where: str = "", align: int = ALIGNMENT) -> dict[str, TensorEntry]:
    """Read and check the header of a safetensors file.

    Every tensor must be of a known dtype, aligned to ``align`` bytes, inside the file, and the data must be
    covered without gaps and overlaps. Raises EngineError otherwise, in which the file is called ``where``.
    """
    where = where or path.name
    with open_regular(path) as file:
        file_size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(read_exact(file, 8, where), "little")
        if length > min(MAX_HEADER_BYTES, file_size - 8):
            raise EngineError(f"{where}: the header claims {length} bytes of a file of {file_size}.")
        text = read_exact(file, length, where)
    if (8 + length) % align:
        raise EngineError(f"{where}: data starts at byte {8 + length}, not at a multiple of {align}.")
    return parse_header(text, 8 + length, file_size, where, align)


def parse_header(
    text: bytes, data_start: int, file_size: int, where: str, align: int = ALIGNMENT
) -> dict[str, TensorEntry]:
    """Check a safetensors header's JSON against the file that it describes; offsets returned count from byte
    0.
    """
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{where}: the tensor table is not JSON ({type(error).__name__}).") from None
    if not isinstance(table, dict) or len(table) > MAX_TENSORS:
        raise EngineError(f"{where}: the tensor table is not an object of at most {MAX_TENSORS} entries.")
    table.pop("__metadata__", None)
    entries = {name: _entry(name, item, data_start, align, where) for name, item in table.items()}
    end = data_start
    for entry in sorted(entries.values(), key=lambda entry: entry.offset):
        if entry.offset != end:
            raise EngineError(
                f"{where}: tensor data overlaps or leaves a gap at byte {entry.offset} (expected {end})."
            )
        end += entry.nbytes
    if end != file_size:
        raise EngineError(
            f"{where}: tensors end at byte {end}, the file has {file_size}. It is truncated or damaged."
        )
    return entries


def _entry(name: str, item: Any, data_start: int, align: int, where: str) -> TensorEntry:
    if (
        not isinstance(item, dict)
        or set(item) != {"dtype", "shape", "data_offsets"}
        or not name
        or len(name) > 512
    ):
        raise EngineError(f"{where}: a tensor's entry must have exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    sizes = _SIZES
    if not isinstance(dtype, str) or dtype not in sizes:
        raise EngineError(
            f"{where}: tensor {name[:80]!r} has an unknown dtype; expected one of {sorted(sizes)}."
        )
    if not _is_ints(shape, 1 << 40) or len(shape) > 6 or not _is_ints(offsets, 1 << 50) or len(offsets) != 2:
        raise EngineError(f"{where}: tensor {name[:80]!r} has a malformed shape or data_offsets.")
    begin, end = offsets
    nbytes = math.prod(shape) * sizes[dtype]
    if end - begin != nbytes:
        raise EngineError(
            f"{where}: tensor {name[:80]!r} spans {end - begin} bytes, its shape needs {nbytes}."
        )
    if begin % align or nbytes % align:
        raise EngineError(f"{where}: tensor {name[:80]!r} is not aligned to {align} bytes.")
    return TensorEntry(dtype, tuple(shape), data_start + begin, nbytes)


def _is_ints(value: Any, bound: int) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= bound for item in value)
