"""Reading files that may be anything: bounded sizes, regular files only, every failure an EngineError."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from castiron.errors import EngineError

_CHUNK = 8 << 20


def regular_size(path: Path) -> int:
    """Return the size in bytes of a regular file; symbolic links and special files are refused."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{path.name} is missing or unreadable in {path.parent} ({_reason(error)})."
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise EngineError(
            f"{path} is not a regular file; engines hold plain files only, no links or devices."
        )
    return status.st_size


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes."""
    size = regular_size(path)
    if size > limit:
        raise EngineError(f"{path} has {size} bytes; at most {limit} are expected there.")
    try:
        with open_regular(path) as file:
            return read_exact(file, size, path.name)
    except OSError as error:
        raise EngineError(f"{path} cannot be read ({_reason(error)}).") from None


def open_regular(path: Path) -> BinaryIO:
    """Open for reading without following a link at the last component."""
    return os.fdopen(
        os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0
    )


def read_exact(file: BinaryIO, count: int, where: str) -> bytes:
    """Return ``count`` bytes, or raise EngineError when the file ends before."""
    parts: list[bytes] = []
    while count:
        part = file.read(min(count, 1 << 30))
        if not part:
            raise EngineError(f"{where} is truncated: {count} more bytes are expected.")
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def sha256_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return the hex SHA-256 of a regular file; ``progress`` gets the bytes done since the last call."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with open_regular(path) as file:
            while count := file.readinto(buffer):  # type: ignore[attr-defined]
                digest.update(buffer[:count])
                if progress is not None:
                    progress(count)
    except OSError as error:
        raise EngineError(f"{path} cannot be read ({_reason(error)}).") from None
    return digest.hexdigest()


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
