"""Quantized matrices of a GGUF file: read where they lie, in its own blocks.

The converted folder of a GGUF file (``checkpoint/gguf.py``) holds what is not quantized, and a table of the
blocks: for each parameter the place in the GGUF file, its type, and in which order its rows come.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from castiron.errors import CheckpointError

from ...weights.gguf_blocks import BLOCK_KINDS
from ..config import read_json_object
from ..safetensors_file import TensorInfo
from .expression import dequantize, gather, stored, unpack
from .scheme import Read
from .tensor import MadeTensor

#: The table of blocks in a converted folder.
TABLE: Final = "gguf_blocks.json"


@dataclass(frozen=True)
class Blocks:
    """A parameter [rows, inputs] in a GGUF file.

    Attributes:
        tensor, type, offset: its name, type and first byte there.
        shape: [rows, inputs].
        order: which of the table's orders its rows come in: row i of the parameter is row order[i] of the
            file. None: as they are.
    """

    tensor: str
    type: str
    offset: int
    shape: tuple[int, int]
    order: int | None


def write_table(folder: Path, file: Path, blocks: Mapping[str, Blocks], orders: list[list[int]]) -> None:
    """Leave the table of ``blocks`` (by parameter) in a converted folder."""
    values = {
        "file": str(file),
        "orders": orders,
        "blocks": {name: asdict(entry) for name, entry in blocks.items()},
    }
    (folder / TABLE).write_text(json.dumps(values))


def read(folder: Path) -> Read | None:
    """The quantized parameters of a converted folder; None if it is no folder of a GGUF file with such."""
    path = folder / TABLE
    if not path.is_file():
        return None
    table = read_json_object(path)
    try:
        file, orders = Path(table["file"]), [np.array(order, np.int64) for order in table["orders"]]
        entries = {name: Blocks(**entry) for name, entry in table["blocks"].items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is damaged ({error}). Delete its folder, a cache.") from error
    if not file.is_file():
        raise CheckpointError(f"{file}: not found; {folder} is the converted form of it.")
    tensors = tuple(_tensor(name, entry, file, orders) for name, entry in entries.items())
    kinds = sorted({entry.type for entry in entries.values()})
    return Read(tensors, f"gguf {', '.join(kinds)}")


def _tensor(name: str, entry: Blocks, file: Path, orders: list[npt.NDArray[Any]]) -> MadeTensor:
    kind = BLOCK_KINDS[entry.type]
    rows, inputs = entry.shape
    row_bytes = inputs // kind.width * kind.nbytes
    place = TensorInfo(
        entry.tensor, file, np.dtype(np.uint8), (rows, row_bytes), entry.offset, rows * row_bytes
    )
    raw, layout = stored(place), entry.type.lower()
    offset = unpack(raw, f"{layout}_offsets") if kind.has_offset else None
    weight = dequantize(
        unpack(raw, f"{layout}_codes"),
        unpack(raw, f"{layout}_scales"),
        offset,
        kind.format,
        0 if kind.group >= inputs else kind.group,
    )
    if entry.order is not None:
        weight = gather(weight, orders[entry.order], 0)
    return MadeTensor(name, weight, layout)
