"""The GGUF container, walked through before a library reads it: damage is told by where it is.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (magic, version, counts, metadata,
descriptions of tensors, and, from a multiple of ``general.alignment`` bytes on, their data).
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Final

from castiron.errors import CheckpointError

from .safetensors_file import refuse_lfs_pointer

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
#: Bytes of a value of metadata, by its type; strings and arrays have a length in front.
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_ALIGNMENT: Final = "general.alignment"
_MOST_DIMENSIONS: Final = 8


def check_gguf(file: Path) -> None:
    """Raise CheckpointError for a file that is no GGUF file, or not all of one; its numbers are not read."""
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
            refuse_lfs_pointer(file, start)
            if start[:4] != _MAGIC:
                raise CheckpointError(
                    f"{file}: begins with {start[:4]!r}, and GGUF files with {_MAGIC!r}. It is something "
                    "else, or damaged: download it again."
                )
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _Walk(file, content).all()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


class _Walk:
    """A place in the file, and what has been read up to it."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self._file = file
        self._content = content
        self._at = len(_MAGIC)
        self._alignment = 32

    def all(self) -> None:
        """From the magic bytes to the last tensor's data."""
        version = self._number("<I", "its version")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._file}: is of GGUF version {version}; read are {_VERSIONS[0]} and {_VERSIONS[1]}, "
                "little-endian. Convert the model again with a current llama.cpp."
            )
        tensors = self._number("<Q", "the number of its tensors")
        entries = self._number("<Q", "the number of its metadata")
        for i in range(entries):
            self._entry(f"entry {i + 1} of {entries} of its metadata")
        ends = [self._tensor(f"the description of tensor {i + 1} of {tensors}") for i in range(tensors)]
        start = -(-self._at // self._alignment) * self._alignment
        for name, end in ends:
            self._require(start + end, f"tensor {name!r}")

    def _entry(self, what: str) -> None:
        key = self._text(what)
        kind = self._number("<I", what)
        if kind == _ARRAY:
            kind, count = self._number("<I", what), self._number("<Q", what)
            if kind == _STRING:
                for _ in range(count):
                    self._text(what)
                return
        elif kind == _STRING:
            self._text(what)
            return
        elif key == _ALIGNMENT and kind == _UINT32:
            self._alignment = max(1, self._number("<I", what))
            return
        else:
            count = 1
        if kind not in _SIZES:
            raise self._bad(f"{what} ({key!r:.80}) is of type {kind}, which GGUF does not have")
        self._skip(count * _SIZES[kind], what)

    def _tensor(self, what: str) -> tuple[str, int]:
        """Name of a tensor, and where its data end, counted from where all data start."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._text(what)
        dimensions = self._number("<I", what)
        if dimensions > _MOST_DIMENSIONS:
            raise self._bad(f"{what} ({name!r:.80}) has {dimensions} dimensions")
        size = math.prod(self._number("<Q", what) for _ in range(dimensions))
        kind, offset = self._number("<I", what), self._number("<Q", what)
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError):
            raise CheckpointError(
                f"{self._file}: tensor {name!r:.80} is of GGML type {kind}, which the installed gguf package "
                "does not know. Update it (pip install -U gguf), or use a file with other types."
            ) from None
        return name, offset + size // block * block_bytes

    def _number(self, form: str, what: str) -> int:
        place = self._at
        self._skip(struct.calcsize(form), what)
        number: int = struct.unpack_from(form, self._content, place)[0]
        return number

    def _text(self, what: str) -> str:
        length = self._number("<Q", what)
        place = self._at
        self._skip(length, what)
        return self._content[place : self._at].decode("utf-8", "replace")

    def _skip(self, count: int, what: str) -> None:
        self._require(self._at + count, what)
        self._at += count

    def _require(self, end: int, what: str) -> None:
        if end > len(self._content):
            raise self._bad(f"it has {len(self._content)} bytes, but {what} ends at byte {end} or later")

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: not a complete GGUF file: {what}. Download it again.")
