"""Which safetensors files of a folder count: the index decides, what it does not name is reported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from castiron.errors import CheckpointError

from .config import read_json_object
from .safetensors_file import TensorInfo, read_header

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"


@dataclass(frozen=True)
class Shards:
    """The tensors that belong to the model, and sentences about files that do not."""

    tensors: dict[str, TensorInfo]
    notes: tuple[str, ...]


def has_safetensors(folder: Path) -> bool:
    """Whether the folder holds safetensors weights of a model, complete or not."""
    return (folder / INDEX).is_file() or any(not _is_adapter(path) for path in folder.glob("*.safetensors"))


def _is_adapter(path: Path) -> bool:
    return path.name.startswith("adapter_model")


def read_shards(folder: Path) -> Shards:
    """Read the headers of all files that count; ``CheckpointError`` if a file or a tensor is missing."""
    present = {path.name for path in folder.glob("*.safetensors")}
    if (folder / INDEX).is_file():
        tensors, used, notes = _indexed(folder)
    else:
        name = _only_file(folder, present)
        tensors, used, notes = read_header(folder / name), {name}, []
    if not tensors:
        raise CheckpointError(
            f"{folder}: its safetensors files hold no tensor; expected the model's weights."
        )
    stale = sorted(present - used)
    if stale:
        reason = f"not named by {INDEX}" if (folder / INDEX).is_file() else f"{SINGLE} is the model"
        notes.append(f"ignored {', '.join(stale)}: {reason}")
    return Shards(tensors, tuple(notes))


def _only_file(folder: Path, present: set[str]) -> str:
    if SINGLE in present:
        return SINGLE
    models = {name for name in present if not _is_adapter(Path(name))}
    if len(models) == 1:
        return models.pop()
    raise CheckpointError(
        f"{folder}: found {len(present)} safetensors files ({', '.join(sorted(present)[:4])}…) but neither "
        f"{SINGLE} nor {INDEX}, which says what belongs to the model. Download the missing file."
    )


def _indexed(folder: Path) -> tuple[dict[str, TensorInfo], set[str], list[str]]:
    index = folder / INDEX
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(
            f"{index}: 'weight_map' must map tensor names to file names. Download it again."
        )
    used: set[str] = set(weight_map.values())
    for file in sorted(used):
        # A file name is joined to the folder: one that leads elsewhere is an attack or an accident.
        if PurePosixPath(file).name != file or "\\" in file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{index}: names the file {file!r}; expected a plain name in the same folder."
            )
    missing = sorted(file for file in used if not (folder / file).is_file())
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(used)} files named by {INDEX} are missing: "
            f"{', '.join(missing[:4])}{'…' if len(missing) > 4 else ''}. Download them."
        )
    headers = {file: read_header(folder / file) for file in sorted(used)}
    tensors: dict[str, TensorInfo] = {}
    for name, file in weight_map.items():
        if name not in headers[file]:
            elsewhere = sorted(other for other, header in headers.items() if name in header)
            raise CheckpointError(
                f"{folder}: {INDEX} places tensor {name!r} in {file}, which does not hold it"
                f"{f' ({elsewhere[0]} does)' if elsewhere else ''}. Index and shards are of different "
                "versions: download all of them again."
            )
        tensors[name] = headers[file][name]
    notes = []
    for file, header in headers.items():
        unnamed = sorted(name for name in header if name not in weight_map or (weight_map[name] != file))
        if unnamed:
            notes.append(
                f"ignored {len(unnamed)} tensors of {file} that {INDEX} does not place there "
                f"({', '.join(unnamed[:3])}{'…' if len(unnamed) > 3 else ''})"
            )
    return tensors, used, notes
