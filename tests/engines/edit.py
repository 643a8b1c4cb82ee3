"""Ways to change a written engine while keeping its sizes and hashes consistent, so that deeper checks are
reached.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def copy_engine(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "config.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def seal(folder: Path, entries: dict[str, bytes] | None = None) -> None:
    """Make the manifest agree with the files, and with ``entries`` of rank0.engine where given."""

    def change(manifest: dict[str, Any]) -> None:
        for name, record in manifest["files"].items():
            if (folder / name).is_file():
                data = (folder / name).read_bytes()
                record.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        if entries is not None:
            manifest["entries"] = {
                name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for name, data in entries.items()
            }

    edit_manifest(folder, change)


def read_entries(folder: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(folder / "rank0.engine") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_entries(folder: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    """Replace rank0.engine by a ZIP of ``entries`` and seal the engine again."""
    with zipfile.ZipFile(folder / "rank0.engine", "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
    seal(folder, entries)


def edit_program(folder: Path, change: Callable[[dict[str, Any]], object], target: str = "host") -> None:
    entries = read_entries(folder)
    program = json.loads(entries[f"{target}/program.json"])
    change(program)
    entries[f"{target}/program.json"] = json.dumps(program).encode()
    write_entries(folder, entries)


def write_weights_header(folder: Path, table: Any, data_bytes: int | None = None) -> None:
    """Replace the header of rank0.safetensors, keeping the data, and seal the engine again."""
    file = folder / "rank0.safetensors"
    content = file.read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    text += b" " * (-(8 + len(text)) % 64)
    if data_bytes is not None:
        data = bytes(data_bytes)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    seal(folder)


def read_weights_header(folder: Path) -> dict[str, Any]:
    content = (folder / "rank0.safetensors").read_bytes()
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header
