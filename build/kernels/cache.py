"""Compiled kernels by content, so that a second build of a model compiles nothing."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from .job import PTX_VERSION, Compiled, CudaJob, TritonJob

#: Raised when what an entry holds, or what the workers make of a job, changes.
_FORMAT = 6
_DIGEST_BYTES = 32


class KernelCache:
    """A folder of entries; any failure to read or write one is a miss, never an error of the build.

    ``folder``: None for ``$XDG_CACHE_HOME/castiron/kernels``, by default ``~/.cache/castiron/kernels``.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or _default_folder()

    def get(self, key: str) -> Compiled | None:
        """The kernel, or None where the cache lacks it or its entry is damaged."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            return None
        # Pickle is as safe here as the Python files around it: the folder is the user's own, and bytes that
        # something else than this class wrote do not pass the hash by accident.
        try:
            found = pickle.loads(data)
        except Exception:
            return None
        return found if isinstance(found, Compiled) else None

    def put(self, key: str, compiled: Compiled) -> None:
        """Store a kernel; another build that stores the same one at the same time does no harm."""
        data = pickle.dumps(compiled)
        path = self._path(key)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=path.parent)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(hashlib.sha256(data).digest() + data)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key


def _default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "castiron", "kernels")


def cache_key(job: TritonJob | CudaJob, source_key: str, compilers: str) -> str:
    """A hash of all that decides the machine code.

    ``source_key``: identifies a Triton function with everything that it calls and every global it reads.
    ``compilers``: their versions.
    """
    fields = asdict(job)
    if isinstance(job, TritonJob):
        fields["constants"] = [(name, type(value).__name__, repr(value)) for name, value in job.constants]
        # Where the source lies does not matter: what it says is in ``source_key``.
        del fields["file"], fields["module"]
    text = repr((_FORMAT, PTX_VERSION, type(job).__name__, sorted(fields.items()), source_key, compilers))
    return hashlib.sha256(text.encode()).hexdigest()
