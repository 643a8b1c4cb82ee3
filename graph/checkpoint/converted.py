"""The cache of checkpoints that had to be converted to safetensors first."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from castiron.errors import CheckpointError

from .safetensors_file import DTYPES, write_safetensors

#: Part of the cache key: raise it when a converter writes something else than before.
_VERSION: Final = 2
_DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/castiron/converted``, by default below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "castiron" / "converted"


def converted(sources: Sequence[Path], convert: Callable[[Path], None]) -> tuple[Path, tuple[str, ...]]:
    """The converted form of ``sources``, made by ``convert(folder)`` unless an earlier run made it.

    The key is path, size and time of change of every source file. The folder appears under its name only when
    complete. Returns the folder and a sentence for the user.
    """
    digest = hashlib.sha256(f"{_VERSION}".encode())
    for source in sources:
        status = source.stat()
        digest.update(repr((str(source.resolve()), status.st_size, status.st_mtime_ns)).encode())
    folder = cache_folder() / f"{sources[0].stem}-{digest.hexdigest()[:16]}"
    what = f"{sources[0]} read through its safetensors form in {folder} (a cache: delete it at will)"
    if folder.is_dir():
        return folder, (what,)
    work: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
        convert(work)
        try:
            work.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process finished first; its result is the same
                raise
    except OSError as error:
        raise CheckpointError(
            f"{folder.parent}: the converted checkpoint cannot be written: {error.strerror or error}. Free "
            "space there, or set XDG_CACHE_HOME to a folder with room."
        ) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return folder, (what,)


def save_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Write torch tensors; float32 ones in the narrowest of bf16, f16 and f32 that keeps every value."""
    entries = {}
    for name, tensor in tensors.items():
        array = _numpy(tensor)
        dtype = _narrowest(array)
        entries[name] = (_DTYPE_NAMES[dtype], array.shape, _maker(tensor, dtype))
    write_safetensors(path, entries)


def _maker(tensor: Any, dtype: np.dtype[Any]) -> Callable[[], npt.NDArray[Any]]:
    return lambda: _numpy(tensor).astype(dtype, copy=False)


def _numpy(tensor: Any) -> npt.NDArray[Any]:
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.uint16).numpy()).view(DTYPES["BF16"])
    return np.asarray(tensor.numpy())


def _narrowest(array: npt.NDArray[Any]) -> np.dtype[Any]:
    if array.dtype != np.float32:
        return array.dtype
    for name in ("BF16", "F16"):
        with np.errstate(over="ignore"):
            if np.array_equal(array.astype(DTYPES[name]).astype(np.float32), array):
                return DTYPES[name]
    return array.dtype


def copy_companions(folder: Path, target: Path, skip: str = "") -> None:
    """Copy what is not weights: configs, tokenizer, templates."""
    for pattern in ("*.json", "*.jinja", "*.txt", "*.model"):
        for file in folder.glob(pattern):
            if file.is_file() and file.name != skip and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)
