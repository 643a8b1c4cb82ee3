"""``rank0.safetensors``: a streaming writer and a distrustful header reader.

A plain safetensors file with two promises on top: tensor data starts at a multiple of 64 bytes, and every
tensor's size is a multiple of 64 bytes; so each tensor is 64-byte aligned in the file and in a mapping of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from castiron.errors import BuildError, EngineError

from .files import open_regular, read_exact
from .program import Weight

ALIGNMENT = 64
MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1 << 20
_CODES = {"f32": ("F32", 4), "bf16": ("BF16", 2)}
_SIZES = dict(_CODES.values())
#: Called with (bytes done, bytes in all) after every chunk.
Progress = Callable[[int, int], None]


class PackedSource(Protocol):
    """A weight in its final layout, produced piece by piece so that it is never whole in memory."""

    @property
    def name(self) -> str:
        """The name under which programs refer to it."""

    @property
    def dtype(self) -> str:
        """f32 or bf16."""

    @property
    def stored_shape(self) -> Sequence[int]:
        """The shape in the file, padding included."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file, a multiple of 64."""

    def chunks(self) -> Iterator[Any]:
        """Yield consecutive pieces: arrays or bytes, ``nbytes`` in all."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: ``offset`` from the start of the file, both numbers in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def layout_bytes(weight: Weight) -> int:
    """Return the bytes that ``weight`` takes in its layout (docs/program.md), before padding to 64."""
    size = _CODES[weight.dtype][1]
    if weight.layout == "plain":
        return math.prod(weight.shape) * size
    rows, columns = weight.shape
    panels = -(-rows // 16)
    if weight.layout == "panel16":
        return panels * columns * 16 * 4
    return panels * (-(-columns // 2)) * 16 * 2 * 2


def write_weights(
    path: Path, sources: Iterable[PackedSource], progress: Progress | None = None
) -> tuple[int, str]:
    """Stream ``sources`` into a safetensors file; return its size in bytes and its SHA-256.

    Raises BuildError when a source breaks its own description; OSError as the file system does.
    """
    ordered = list(sources)
    header = _header(ordered)
    total = sum(source.nbytes for source in ordered)
    digest = hashlib.sha256(header)
    done = 0
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1, "castiron-hash") as hasher:
        _write_all(file.fileno(), header)
        for source in ordered:
            written = 0
            for chunk in source.chunks():
                view = memoryview(chunk).cast("B") if not hasattr(chunk, "view") else _bytes_of(chunk)
                written += view.nbytes
                if written > source.nbytes:
                    break
                # Hashing and writing overlap; both end before the packer may reuse its buffer.
                hashing = hasher.submit(digest.update, view)
                try:
                    _write_all(file.fileno(), view)
                finally:
                    hashing.result()
                done += view.nbytes
                if progress is not None:
                    progress(done, total)
            if written != source.nbytes:
                over = "over " if written > source.nbytes else ""
                raise BuildError(
                    f"packing {source.name!r} gave {over}{written} bytes; "
                    f"{source.nbytes} were announced. This is a bug in its packer."
                )
        os.fsync(file.fileno())
    return len(header) + total, digest.hexdigest()


def _bytes_of(array: Any) -> memoryview:
    # ml_dtypes.bfloat16 has no buffer protocol; its bytes do.
    return memoryview(array.reshape(-1).view("u1"))


def _header(sources: list[PackedSource]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "castiron"}}
    offset = 0
    for source in sources:
        if source.dtype not in _CODES:
            raise BuildError(
                f"weight {source.name!r} has dtype {source.dtype!r}; expected one of {sorted(_CODES)}."
            )
        code, size = _CODES[source.dtype]
        expected = math.prod(source.stored_shape) * size
        if source.nbytes != expected or source.nbytes % ALIGNMENT or source.nbytes == 0:
            raise BuildError(
                f"weight {source.name!r} is announced with {source.nbytes} bytes for shape "
                f"{list(source.stored_shape)} of {source.dtype} ({expected} bytes); "
                f"both must agree and be a multiple of {ALIGNMENT}."
            )
        if source.name in table:
            raise BuildError(f"two weights are named {source.name!r}; names must be unique.")
        table[source.name] = {
            "dtype": code,
            "shape": [int(size) for size in source.stored_shape],
            "data_offsets": [offset, offset + source.nbytes],
        }
        offset += source.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES or len(sources) > MAX_TENSORS:
        raise BuildError(
            f"{len(sources)} weights need a header of {len(text)} bytes; at most {MAX_HEADER_BYTES}."
        )
    return len(text).to_bytes(8, "little") + text


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view.nbytes:
        # A single write() takes at most 2 GiB on Linux.
        view = view[os.write(fd, view[: 1 << 30]) :]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read and check the header of a safetensors file that castiron wrote.

    Every tensor must be of a known dtype, 64-byte aligned, inside the file, and the data must be covered
    without gaps and overlaps. Raises EngineError otherwise.
    """
    with open_regular(path) as file:
        file_size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(read_exact(file, 8, path.name), "little")
        if length > min(MAX_HEADER_BYTES, file_size - 8):
            raise EngineError(f"{path.name}: the header claims {length} bytes of a file of {file_size}.")
        text = read_exact(file, length, path.name)
    if (8 + length) % ALIGNMENT:
        raise EngineError(f"{path.name}: data starts at byte {8 + length}, not at a multiple of {ALIGNMENT}.")
    return parse_header(text, 8 + length, file_size, path.name)


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
    sizes = {**_SIZES, "I32": 4}
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
