"""``rank0.engine``: a ZIP of stored entries. Written with zipfile, read by a parser that accepts only that.

The reader takes nothing but what the writer makes: no compression (so no bombs), no encryption, no ZIP64, no
comments, no gaps, names from a small alphabet. What any other tool could hide in a ZIP is refused, not
interpreted.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

from castiron.errors import BuildError, EngineError

from .files import open_regular, read_exact, regular_size
from .manifest import FileRecord

MAX_ENTRIES = 4096
MAX_BYTES = (4 << 30) - (1 << 20)
_NAME = re.compile(rb"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*(/[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*){0,3}")
_END = struct.Struct("<4sHHHHIIH")
_CENTRAL = struct.Struct("<4sBBHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")


def write_container(path: Path, entries: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Write ``entries`` as a ZIP with fixed timestamps, so that equal contents give equal files."""
    import zipfile  # a dozen modules that opening an engine does without

    if sum(map(len, entries.values())) > MAX_BYTES:
        raise BuildError(f"{path.name} would pass {MAX_BYTES} bytes, the most that its format holds.")
    records = {}
    with open(path, "xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=False) as archive:
            for name, data in entries.items():
                if not _NAME.fullmatch(name.encode()):
                    raise BuildError(f"{name!r} cannot be the name of an entry of {path.name}.")
                info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                info.external_attr = 0o644 << 16
                archive.writestr(info, data)
                records[name] = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        file.flush()
        os.fsync(file.fileno())
    return records


class Container:
    """The entries of a ``rank0.engine``, read and checked on demand."""

    def __init__(self, path: Path, records: Mapping[str, FileRecord]) -> None:
        """Check the directory of the ZIP against ``records``; raises EngineError when they disagree."""
        self._path = path
        self._records = records
        try:
            self._places = _read_directory(path)
        except OSError as error:
            raise EngineError(f"{path} cannot be read ({error.strerror}).") from None
        if {name: size for name, (_, size, _) in self._places.items()} != {
            n: r.size for n, r in records.items()
        }:
            raise EngineError(
                f"{path} does not hold the entries that config.json lists. The engine is damaged."
            )

    @property
    def names(self) -> list[str]:
        """Names of all entries."""
        return list(self._places)

    def read(self, name: str, limit: int) -> bytes:
        """Return an entry of at most ``limit`` bytes whose CRC and SHA-256 are right."""
        if name not in self._places:
            raise EngineError(f"{self._path} has no entry {name!r}. Rebuild the engine.")
        offset, size, crc = self._places[name]
        if size > limit:
            raise EngineError(f"{self._path}: entry {name!r} has {size} bytes; at most {limit} are expected.")
        try:
            with open_regular(self._path) as file:
                file.seek(offset)
                data = read_exact(file, size, self._path.name)
        except OSError as error:
            raise EngineError(f"{self._path} cannot be read ({error.strerror}).") from None
        if zlib.crc32(data) != crc or hashlib.sha256(data).hexdigest() != self._records[name].sha256:
            raise EngineError(
                f"{self._path}: entry {name!r} is damaged (checksum mismatch). Rebuild the engine."
            )
        return data


def _read_directory(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return {name: (offset of data, size, crc)} of a ZIP whose every byte is accounted for."""
    size = regular_size(path)
    if not _END.size <= size <= MAX_BYTES:
        raise EngineError(
            f"{path} has {size} bytes, which no engine program has. It is truncated or damaged."
        )
    with open_regular(path) as file:
        file.seek(size - _END.size)
        magic, disk, start_disk, here, count, length, start, comment = _END.unpack(
            read_exact(file, _END.size, path.name)
        )
        if magic != b"PK\x05\x06" or disk or start_disk or here != count or comment or count > MAX_ENTRIES:
            raise EngineError(f"{path} does not end as a castiron program does. It is truncated or damaged.")
        if start + length != size - _END.size or length > count * (_CENTRAL.size + 256):
            raise EngineError(f"{path}: the directory of its ZIP does not fit the file.")
        file.seek(start)
        central = io.BytesIO(read_exact(file, length, path.name))
        places: dict[str, tuple[int, int, int]] = {}
        end = 0
        for _ in range(count):
            name, offset, data_size, crc = _central_entry(central, path)
            if name in places or offset != end:
                raise EngineError(f"{path}: its ZIP has duplicate, overlapping or hidden entries.")
            file.seek(offset)
            end = offset + _check_local(
                read_exact(file, _LOCAL.size + len(name), path.name), name, data_size, crc, path
            )
            places[name] = (end, data_size, crc)
            end += data_size
    if end != start or central.read(1):
        raise EngineError(f"{path}: its ZIP holds bytes that belong to no entry.")
    return places


def _central_entry(central: io.BytesIO, path: Path) -> tuple[str, int, int, int]:
    fixed = central.read(_CENTRAL.size)
    if len(fixed) != _CENTRAL.size:
        raise EngineError(f"{path}: the directory of its ZIP is cut short.")
    magic, _, _, _, flags, method, _, _, crc, packed, plain, name_size, extra, comment, disk, _, _, offset = (
        _CENTRAL.unpack(fixed)
    )
    raw = central.read(name_size)
    if magic != b"PK\x01\x02" or flags or method or packed != plain or extra or comment or disk:
        raise EngineError(
            f"{path}: an entry of its ZIP is compressed, encrypted or otherwise not as written."
        )
    if len(raw) != name_size or name_size > 256 or not _NAME.fullmatch(raw):
        raise EngineError(f"{path}: an entry of its ZIP has a forbidden name.")
    return raw.decode("ascii"), offset, plain, crc


def _check_local(header: bytes, name: str, data_size: int, crc: int, path: Path) -> int:
    """Compare an entry's own header with the directory; return the header's size."""
    magic, _, flags, method, _, _, local_crc, packed, plain, name_size, extra = _LOCAL.unpack_from(header)
    expected = (b"PK\x03\x04", 0, 0, crc, data_size, data_size, len(name), 0)
    if (magic, flags, method, local_crc, packed, plain, name_size, extra) != expected or header[
        _LOCAL.size :
    ] != name.encode():
        raise EngineError(f"{path}: an entry of its ZIP contradicts the directory.")
    return len(header)
