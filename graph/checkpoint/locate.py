"""What the user may name as a model, and the folder that is read in its place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from castiron.errors import CheckpointError

from .shards import has_safetensors

#: Files of a hub repository that a build reads.
_HUB_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class Located:
    """A folder with config.json and safetensors, and sentences about how it came to be."""

    folder: Path
    notes: tuple[str, ...]


def locate(source: str | Path) -> Located:
    """Find or make the safetensors folder of a local folder, a GGUF file or a hub id."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            from .gguf import convert_gguf

            return Located(*convert_gguf(path))
        raise CheckpointError(
            f"{path}: is a file; expected a Hugging Face folder or a .gguf file. "
            "Name the folder that holds it."
        )
    if path.is_dir():
        return _folder(path)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(source)):
        return _hub(str(source))
    raise CheckpointError(f"{source}: not found; expected a Hugging Face folder, a .gguf file or a hub id.")


def _folder(path: Path) -> Located:
    if has_safetensors(path):
        return Located(path, ())
    if (path / "pytorch_model.bin").is_file() or (path / "pytorch_model.bin.index.json").is_file():
        from .torch_bin import convert_torch_bin

        return Located(*convert_torch_bin(path))
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path}: holds an adapter and no model; merge it into its base model (peft: merge_and_unload) "
            "and save the result."
        )
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        raise CheckpointError(
            f"{path}: holds GGUF files and no safetensors; name the file to build, for example {ggufs[0]}."
        )
    raise CheckpointError(
        f"{path}: holds no *.safetensors and no pytorch_model.bin; expected a Hugging Face checkpoint folder."
    )


def _hub(repository: str) -> Located:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repository, allow_patterns=_HUB_FILES)
    except Exception as error:  # network, authorisation, unknown repository: all are the same to the user
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{repository}: no such local path, and the Hugging Face hub did not provide it ({reason}). "
            "Check the name and the connection, or download the repository and name its folder."
        ) from error
    return Located(Path(folder), (f"downloaded from the hub into {folder}",))
