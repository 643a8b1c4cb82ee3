"""Folders that hold only ``pytorch_model.bin``: converted to safetensors without running pickled code."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, Final

from castiron.errors import CheckpointError

from .config import read_config, read_json_object
from .converted import converted, copy_companions, save_tensors
from .safetensors_file import DTYPES, read_header, refuse_lfs_pointer
from .shards import INDEX, SINGLE

_BIN: Final = "pytorch_model.bin"
_BIN_INDEX: Final = "pytorch_model.bin.index.json"
#: What numpy can be given; torch names them alike.
_DTYPES: Final = {dtype.name for dtype in DTYPES.values() if not dtype.name.startswith("float8")}


def convert_torch_bin(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """A safetensors folder with the tensors of ``pytorch_model.bin`` (or its shards) and everything else."""
    read_config(folder)  # a folder that cannot be built is refused before gigabytes are copied
    files = _files(folder)

    def convert(target: Path) -> None:
        copy_companions(folder, target)
        names = [
            SINGLE if len(files) == 1 else f"model-{i + 1:05}-of-{len(files):05}.safetensors"
            for i in range(len(files))
        ]
        for file, name in zip(files, names, strict=True):
            save_tensors(target / name, _load(file))
        if len(files) > 1:
            weight_map = {tensor: name for name in names for tensor in read_header(target / name)}
            (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return converted([*files, folder / "config.json"], convert)


def _files(folder: Path) -> list[Path]:
    if (folder / _BIN).is_file():
        return [folder / _BIN]
    weight_map = read_json_object(folder / _BIN_INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / _BIN_INDEX}: 'weight_map' is missing. Download it again.")
    files = [folder / Path(str(name)).name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{folder}: {', '.join(missing)} named by {_BIN_INDEX} missing. Download them.")
    return files


def _check_whole(file: Path) -> None:
    """Raise CheckpointError for a file that is empty, a pointer, or a ZIP archive without its end."""
    with file.open("rb") as stream:
        start = stream.read(8)
    refuse_lfs_pointer(file, start)
    size = file.stat().st_size
    if not start or (start.startswith(b"PK") and not zipfile.is_zipfile(file)):
        raise CheckpointError(
            f"{file}: is cut off: it has {size} bytes, and the table of its tensors, which is at the end, is "
            "not among them. Download it again."
        )


def _load(file: Path) -> dict[str, Any]:
    import torch

    _check_whole(file)
    try:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch raise many kinds on a damaged or hostile file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{file}: torch cannot read it as plain weights ({reason}). Download it again, or use a "
            "safetensors checkpoint."
        ) from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    ):
        raise CheckpointError(
            f"{file}: holds more than tensors by name (a training state?); expected a state dict as written "
            "by save_pretrained."
        )
    for name, tensor in state.items():
        what = _unreadable(tensor)
        if what:
            raise CheckpointError(
                f"{file}: tensor {name!r} is {what}; expected plain numbers in memory. Load the model where "
                "it was made and save it again with save_pretrained."
            )
    return state


def _unreadable(tensor: Any) -> str:
    """Why a tensor's numbers cannot be taken as they lie; empty where they can."""
    import torch

    if tensor.is_meta:
        return "on the meta device, a shape without numbers"
    if tensor.layout != torch.strided:
        return f"sparse ({tensor.layout})"
    if tensor.is_quantized or str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        return f"of {tensor.dtype}"
    return ""
