"""The safetensors container: a header that is checked before anything is believed, and a streaming writer.

Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from castiron.errors import CheckpointError

#: The limit of the safetensors format itself; a larger length means that the file is something else.
MAX_HEADER_BYTES: Final = 100_000_000

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: ``nbytes`` bytes, C order, at ``offset`` in ``file`` (symlinks resolved)."""

    name: str
    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.nbytes // self.dtype.itemsize


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} appears twice")
        found[key] = value
    return found


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, by name.

    Raises ``CheckpointError`` when the file is truncated, is no safetensors file, or when its header
    describes bytes that are not there, overlap, or do not agree with dtype and shape.
    """
    try:
        path = path.resolve(strict=True)
        with path.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            if len(start) < 8:
                raise _bad(path, f"found {len(start)} bytes, expected at least 8 for the header length")
            refuse_lfs_pointer(path, start)
            header_bytes = int.from_bytes(start, "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise _bad(path, f"found a header length of {header_bytes}, allowed are {MAX_HEADER_BYTES}")
            if 8 + header_bytes > file_bytes:
                raise _bad(path, f"found {file_bytes} bytes, but the header alone ends at {8 + header_bytes}")
            raw = stream.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise _bad(path, f"its header is a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = {name: _entry(path, name, entry, data_start) for name, entry in header.items()}
    _check_layout(path, tensors.values(), data_start, file_bytes)
    return tensors


def refuse_lfs_pointer(path: Path, start: bytes) -> None:
    """Raise CheckpointError where a file of weights begins as a pointer of git-lfs does."""
    if start.startswith(b"version "):  # of https://git-lfs.github.com/spec/v1
        raise CheckpointError(
            f"{path}: is a git-lfs pointer, not the weights themselves. Run 'git lfs pull' in its "
            "folder, or download the file again."
        )


def _bad(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: not a complete safetensors file: {what}. Download it again.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _entry(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _bad(path, f"tensor {name!r} is described by a {type(entry).__name__}, expected an object")
    dtype_name, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {dtype_name!r}; known are {', '.join(DTYPES)}. "
            "Use a checkpoint stored in one of these."
        )
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise _bad(path, f"tensor {name!r} has shape {shape!r}, expected a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise _bad(path, f"tensor {name!r} has data_offsets {offsets!r}, expected [begin, end]")
    begin, end = offsets
    dtype = DTYPES[dtype_name]
    expected = dtype.itemsize
    for size in shape:  # Python integers: no overflow whatever the header claims
        expected *= size
    if end - begin != expected:
        raise _bad(
            path, f"tensor {name!r} ({dtype_name} {shape}) spans {end - begin} bytes, expected {expected}"
        )
    return TensorInfo(name, path, dtype, tuple(shape), data_start + begin, expected)


def _check_layout(path: Path, tensors: Iterable[TensorInfo], data_start: int, file_bytes: int) -> None:
    """Tensors lie side by side, cover the data exactly, and none shares a byte with another."""
    position, previous = data_start, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset + tensor.nbytes > file_bytes:
            raise _bad(
                path,
                f"it has {file_bytes} bytes, but tensor {tensor.name!r} ends at byte "
                f"{tensor.offset + tensor.nbytes}",
            )
        if tensor.offset != position:
            kind = "overlaps" if tensor.offset < position else "leaves a gap after"
            raise _bad(path, f"tensor {tensor.name!r} {kind} {previous}")
        position, previous = tensor.offset + tensor.nbytes, repr(tensor.name)
    if position != file_bytes:
        raise _bad(path, f"{file_bytes - position} bytes after {previous} belong to no tensor")


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], npt.NDArray[Any]]]]
) -> None:
    """Write a safetensors file tensor by tensor.

    ``tensors`` gives dtype name (``DTYPES``), shape and a function that makes the array; each is made when
    its turn comes and dropped afterwards, so one tensor at a time is in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype_name, shape, _) in tensors.items():
        nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype_name].itemsize
        header[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little"))
        stream.write(raw)
        for name, (dtype_name, shape, make) in tensors.items():
            array = np.ascontiguousarray(make())
            if array.dtype != DTYPES[dtype_name] or array.shape != shape:
                raise ValueError(
                    f"{name}: made {array.dtype} {array.shape}, announced {DTYPES[dtype_name]} {shape}"
                )
            stream.write(array.reshape(-1).view(np.uint8).data)
