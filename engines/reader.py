"""Opening an engine. The reader trusts nothing: whatever the folder holds, the outcome is an Engine or an
EngineError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from castiron.errors import EngineError

from .check import check_program
from .container import Container
from .files import read_bounded, regular_size, sha256_file
from .layout import COPIED, MANIFEST, PROGRAM_FILE, WEIGHTS_FILE
from .manifest import Manifest, check_format, rebuild_command
from .program import Program
from .weights_file import TensorEntry, read_header

if TYPE_CHECKING:
    from .golden import GoldenSequence

_MAX_MANIFEST = 16 << 20
_MAX_PROGRAM = 256 << 20
_MAX_GRAPH = 2 << 30
_MAX_SMALL_FILE = 512 << 20
#: A cubin or a PTX text.
MAX_IMAGE_BYTES = 64 << 20
_Schema = TypeVar("_Schema", bound=BaseModel)


class Programs(Mapping[str, Program]):
    """The programs of an engine by target, each read and checked when it is first asked for."""

    def __init__(
        self, where: str, manifest: Manifest, entries: Mapping[str, TensorEntry], container: Container
    ) -> None:
        self._where, self._manifest, self._entries, self._container = where, manifest, entries, container
        self._read: dict[str, Program] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.targets)

    def __len__(self) -> int:
        return len(self._manifest.targets)

    def __contains__(self, target: object) -> bool:
        return target in self._manifest.targets

    def __getitem__(self, target: str) -> Program:
        if target not in self:
            raise KeyError(target)
        if target not in self._read:
            self._read[target] = self._checked(target)
        return self._read[target]

    def _checked(self, target: str) -> Program:
        name, manifest = f"{target}/program.json", self._manifest
        data = self._container.read(name, _MAX_PROGRAM)
        program = _validate(Program, data, f"{self._where}: {name}")
        if program.target != target or program.limits != manifest.limits:
            raise EngineError(f"{self._where}: the program for {target!r} contradicts config.json.")
        if program.vocab_size != manifest.special_tokens.vocab_size:
            raise EngineError(f"{self._where}: program and config.json disagree on the vocabulary size.")
        check_program(program, self._entries, self._container.names)
        return program


@dataclass(frozen=True)
class Engine:
    """An opened engine: all but the weights' bytes and the golden outputs has been read and checked, or,
    where it was opened so, is when it is used.
    """

    path: Path
    manifest: Manifest
    programs: Programs
    #: {weight name: where it lies in rank0.safetensors}
    entries: Mapping[str, TensorEntry]
    generation_config: Mapping[str, Any]
    _container: Container

    @property
    def name(self) -> str:
        """The model's name."""
        return self.manifest.model.name

    @property
    def targets(self) -> list[str]:
        """Targets that the engine has a program for."""
        return list(self.programs)

    @property
    def weights_path(self) -> Path:
        """The file to map."""
        return self.path / WEIGHTS_FILE

    @property
    def tensors(self) -> dict[str, tuple[int, int]]:
        """{weight name: (offset from the start of the file, bytes)}, as ``_core.Engine`` takes it."""
        return {name: (entry.offset, entry.nbytes) for name, entry in self.entries.items()}

    @property
    def tokenizer_dir(self) -> Path | None:
        """The folder of tokenizer.json, or None: token ids in, token ids out."""
        return self.path if "tokenizer.json" in self.manifest.files else None

    def program(self, target: str) -> Program:
        """Return the program of ``target``; raises EngineError naming what the engine has instead."""
        if target not in self.programs:
            raise EngineError(
                f"{self.path} has no program for {target!r}; it was built for {', '.join(self.targets)}. "
                f"Rebuild it: {self.rebuild_command} --target {target}"
            )
        return self.programs[target]

    @property
    def rebuild_command(self) -> str:
        """The command line that makes this engine again."""
        return rebuild_command(self.manifest.model_dump(), str(self.path))

    def golden(self) -> list[GoldenSequence] | None:
        """Read the golden outputs; None for an engine built without."""
        if "golden.safetensors" not in self._container.names:
            return None
        # numpy takes a tenth of a second, and who runs an engine reads none of this
        from .golden import MAX_BYTES, read_golden, unpack_arrays

        data = self._container.read("golden.safetensors", MAX_BYTES)
        arrays = unpack_arrays(data, "golden.safetensors")
        return read_golden(arrays, self.manifest.special_tokens.vocab_size)

    def graph(self) -> bytes | None:
        """Return the ONNX graph that was lowered; None when it was not stored."""
        return (
            self._container.read("graph.onnx", _MAX_GRAPH) if "graph.onnx" in self._container.names else None
        )

    def build_report(self) -> dict[str, Any]:
        """Return what the build decided; empty when it stored nothing."""
        if "build_report.json" not in self._container.names:
            return {}
        data = self._container.read("build_report.json", _MAX_MANIFEST)
        return _json_object(data, f"{self.path}: build_report.json")

    def kernel_images(self, target: str) -> dict[str, bytes]:
        """Read the code of a CUDA target: {entry as in ``Kernel.image`` or ``ptx``: bytes}; {} on host."""
        kernels = self.program(target).kernels
        names = dict.fromkeys(name for kernel in kernels for name in (kernel.image, kernel.ptx) if name)
        images = {name: self._container.read(name, MAX_IMAGE_BYTES) for name in names}
        for name, image in images.items():
            if not name.endswith(".ptx") and not image.startswith(b"\x7fELF"):
                raise EngineError(
                    f"{self.path}: {name} holds no machine code. Rebuild: {self.rebuild_command}"
                )
        return images

    def check_hashes(self, progress: Callable[[int], None] | None = None) -> None:
        """Compare every byte of every file with the manifest's SHA-256; raises EngineError on the first
        difference.

        progress: called with the number of bytes read since the last call.
        """
        for name, record in self.manifest.files.items():
            if sha256_file(self.path / name, progress) != record.sha256:
                raise EngineError(
                    f"{self.path / name} is damaged: its SHA-256 differs. Rebuild: {self.rebuild_command}"
                )


def open_engine(path: str | os.PathLike[str], *, every_program: bool = True) -> Engine:
    """Open an engine folder.

    Checks the version first, then the manifest, presence and size of every file, the hashes of the small
    ones, the program and its fit to the weights' table. The bytes of the weights are checked by
    ``Engine.check_hashes`` alone, so that opening takes milliseconds. ``every_program`` false leaves the
    programs of targets that are not asked for unread: a start needs one.

    Raises EngineError, and nothing else, whatever the folder holds.
    """
    if not isinstance(path, str | os.PathLike):
        raise EngineError(
            f"the engine's folder is {path!r}; expected a path: the folder that castiron build wrote"
        )
    folder = Path(path)
    where = str(folder)
    # os.path.isdir answers False where Path.is_dir raises: a forbidden parent, a name too long.
    if not os.path.isdir(folder):
        raise EngineError(
            f"{where!r} is not a folder. Give the folder that castiron build wrote (--output-dir)."
        )
    manifest = _read_manifest(folder)
    _check_files(folder, manifest)
    container = Container(folder / PROGRAM_FILE, manifest.entries)
    try:
        entries = read_header(folder / WEIGHTS_FILE)
    except OSError as error:
        raise EngineError(f"{folder / WEIGHTS_FILE} cannot be read ({error.strerror}).") from None
    programs = Programs(where, manifest, entries, container)
    if every_program:
        for target in programs:
            programs[target]
    generation: dict[str, Any] = {}
    if "generation_config.json" in manifest.files:
        raw = read_bounded(folder / "generation_config.json", _MAX_MANIFEST)
        generation = _json_object(raw, f"{where}: generation_config.json")
    return Engine(folder, manifest, programs, entries, generation, container)


def _read_manifest(folder: Path) -> Manifest:
    if not os.path.lexists(folder / MANIFEST):
        raise EngineError(
            f"{folder} is not an engine: it has no {MANIFEST}. Give the folder that castiron build wrote."
        )
    raw = read_bounded(folder / MANIFEST, _MAX_MANIFEST)
    check_format(_json_object(raw, f"{folder}: {MANIFEST}"), str(folder))
    manifest = _validate(Manifest, raw, f"{folder}: {MANIFEST}")
    allowed = {PROGRAM_FILE, WEIGHTS_FILE, *COPIED.values()}
    if not {PROGRAM_FILE, WEIGHTS_FILE} <= set(manifest.files) <= allowed:
        raise EngineError(
            f"{folder}: {MANIFEST} must list {PROGRAM_FILE}, {WEIGHTS_FILE} and tokenizer files only."
        )
    tokens = manifest.special_tokens
    if tokens.vocab_size_used > tokens.vocab_size:
        raise EngineError(
            f"{folder}: {MANIFEST} uses more tokens than the vocabulary of {tokens.vocab_size} has."
        )
    outside = [token for token in tokens.eos_token_ids if token >= tokens.vocab_size]
    if outside:
        raise EngineError(
            f"{folder}: {MANIFEST} has the EOS token {outside[0]}, outside the vocabulary of "
            f"{tokens.vocab_size}."
        )
    return manifest


def _check_files(folder: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        size = regular_size(folder / name)
        if size != record.size:
            raise EngineError(
                f"{folder / name} has {size} bytes; {record.size} were written. It is truncated or was "
                "changed; copy the engine again or rebuild it."
            )
        if name not in (PROGRAM_FILE, WEIGHTS_FILE):
            if size > _MAX_SMALL_FILE:
                raise EngineError(f"{folder / name} has {size} bytes; no tokenizer file is that large.")
            if sha256_file(folder / name) != record.sha256:
                raise EngineError(
                    f"{folder / name} was changed after the build: its SHA-256 differs. Rebuild the engine."
                )


def _json_object(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineError(
            f"{where} is not JSON ({type(error).__name__}). It is truncated or damaged."
        ) from None
    if not isinstance(value, dict):
        raise EngineError(f"{where} is not a JSON object.")
    return value


def _validate(schema: type[_Schema], data: bytes, where: str) -> _Schema:
    try:
        return schema.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part)[:60] for part in first["loc"][:8])
        raise EngineError(
            f"{where} is not as castiron writes it: {place or 'root'}: {first['msg'][:200]}."
        ) from None
