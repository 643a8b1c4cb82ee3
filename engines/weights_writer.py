"""Streaming weights into ``rank0.safetensors``: written, padded and hashed chunk by chunk."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from castiron.errors import BuildError

from .weights_file import ALIGNMENT, CODES, MAX_HEADER_BYTES, MAX_TENSORS

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
        if source.dtype not in CODES:
            raise BuildError(
                f"weight {source.name!r} has dtype {source.dtype!r}; expected one of {sorted(CODES)}."
            )
        code, size = CODES[source.dtype]
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
