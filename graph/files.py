"""Reading ranges of files into the caller's memory."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from castiron.errors import CheckpointError


def _close_all(descriptors: dict[Path, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


class FileReader:
    """Positioned reads from files that stay open.

    ``pread`` instead of ``mmap``: mapped pages of a checkpoint count as resident memory of the process, and a
    build would seem (and under a memory limit, be) as large as the model.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self.close = weakref.finalize(self, _close_all, self._descriptors)

    def read_into(self, file: Path, offset: int, out: npt.NDArray[Any]) -> None:
        """Fill ``out`` (C-contiguous) with bytes from ``offset``; ``CheckpointError`` if the file ends."""
        descriptor = self._descriptors.get(file)
        if descriptor is None:
            try:
                descriptor = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be opened: {error.strerror}") from error
            self._descriptors[file] = descriptor
        view = out.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{file}: reading at byte {offset + done}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(
                    f"{file}: ends at byte {offset + done}, expected {len(view) - done} more; it changed "
                    "while it was read. Start again when it is complete."
                )
            done += count
