"""Results of calibration on disk: a folder for each checkpoint and set of options, reused and resumed.

``$XDG_CACHE_HOME/castiron/calibration/<key>/`` holds a safetensors file for each group of products that share
an input, written as soon as the group is done, and ``record.json`` once all are. A run that was interrupted
finds its groups again; the graph of a build refers to the tensors where they lie.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from castiron.errors import BuildError

from ..graph.checkpoint import Checkpoint, read_header, write_safetensors
from ..graph.checkpoint.safetensors_file import DTYPES
from ..graph.quant_plan import TensorRef

Arrays = Mapping[str, npt.NDArray[Any]]
_RECORD: Final = "record.json"
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class Store:
    """The folder of one calibration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(
                f"{folder}: calibration results cannot be kept here: {error.strerror}"
            ) from error

    def refs(self, part: str) -> dict[str, TensorRef] | None:
        """The tensors of a part, or None where it is not there or not whole."""
        file = self.folder / f"{part}.safetensors"
        if not file.is_file():
            return None
        return {
            name: TensorRef(f"{part}:{name}", info.file, info.offset, info.dtype, info.shape)
            for name, info in read_header(file).items()
        }

    def save(self, part: str, arrays: Arrays) -> dict[str, TensorRef]:
        """Write a part, whole or not at all."""
        file = self.folder / f"{part}.safetensors"
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            write_safetensors(
                temporary,
                {
                    name: (_NAMES[array.dtype], array.shape, partial(_same, array))
                    for name, array in arrays.items()
                },
            )
            temporary.replace(file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise BuildError(f"{file}: cannot be written: {error.strerror}; free some space") from error
        found = self.refs(part)
        assert found is not None
        return found

    def record(self) -> dict[str, Any] | None:
        """What a finished calibration noted, or None."""
        try:
            found = json.loads((self.folder / _RECORD).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def finish(self, record: Mapping[str, Any]) -> None:
        """Mark the calibration as complete."""
        temporary = self.folder / f"{_RECORD}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(record, indent=1), "utf-8")
        temporary.replace(self.folder / _RECORD)


def _same(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array


def read_tensor(ref: TensorRef) -> npt.NDArray[Any]:
    """The tensor, mapped from its file."""
    if not ref.nbytes:
        return np.zeros(ref.shape, ref.dtype)
    return np.memmap(ref.file, ref.dtype, "r", ref.offset, ref.shape)


def cache_folder() -> Path:
    """Where calibration results are kept; may be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "castiron" / "calibration"


def key_of(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> str:
    """Name of the folder for a checkpoint, options and this version of the code.

    Weights are told apart by size and time of their files: hashing them would take as long as a calibration.
    """
    digest = hashlib.sha256(checkpoint.fingerprint.encode())
    for file in sorted(checkpoint.folder.glob("*.safetensors")):
        stat = file.stat()
        digest.update(repr((str(file.resolve()), stat.st_size, stat.st_mtime_ns)).encode())
    digest.update(json.dumps(dict(facts), sort_keys=True, default=str).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]
