"""Writing an engine: everything goes to a temporary folder beside the target, which one rename makes the
engine.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

import castiron
from castiron.errors import BuildError

from .container import write_container
from .golden import count_rows, pack_arrays, read_golden, unpack_arrays
from .layout import COPIED, MANIFEST, PROGRAM_FILE, WEIGHTS_FILE
from .manifest import (
    FORMAT_VERSION,
    FileRecord,
    GoldenSummary,
    Manifest,
    MemoryRow,
    ModelIdentity,
    SpecialTokens,
    Verification,
)
from .program import Program
from .quantization import Quantization
from .weights_writer import PackedSource, Progress, write_weights


class EngineWriter:
    """Context manager that makes an engine folder appear whole or not at all.

    output_dir: where the engine will be. It may not exist, be empty, or, with ``overwrite``, be an engine.
    ``path`` is the temporary folder; after ``finish`` it is a complete engine, so that it can be opened and
    verified before leaving the ``with`` block puts it in its place. Any exception, KeyboardInterrupt
    included, removes it.

    Raises BuildError for a target that cannot be written, and for a file system that fails or is full.
    """

    def __init__(self, output_dir: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.output_dir = Path(output_dir).absolute()
        self.overwrite = overwrite
        self.path = Path()
        self._programs: dict[str, Program] = {}
        self._entries: dict[str, bytes] = {}
        self._files: dict[str, FileRecord] = {}
        self._manifest: Manifest | None = None
        self._vocab_size = 0

    def __enter__(self) -> EngineWriter:
        check_output_dir(self.output_dir, self.overwrite)
        with self._writing():
            self.output_dir.parent.mkdir(parents=True, exist_ok=True)
            prefix = f".{self.output_dir.name}.building-"
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=self.output_dir.parent))
            # mkdtemp makes it private; an engine is as readable as any other folder.
            self.path.chmod(0o777 & ~_umask())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._manifest is None:
                    raise BuildError("the engine was not finished; nothing is written.")
                with self._writing():
                    self._put_in_place()
        finally:
            shutil.rmtree(self.path, ignore_errors=True)

    def add_program(self, program: Program) -> None:
        """Add the program of one target."""
        self._programs[program.target] = program
        self._entries[f"{program.target}/program.json"] = program.to_json()

    def add_images(self, images: Mapping[str, bytes]) -> None:
        """Add what programs refer to as ``Kernel.image`` and ``Kernel.ptx``, by entry name."""
        self._entries.update(images)

    def image_bytes(self, program: Program) -> int:
        """Bytes of the images of a program's kernels."""
        names = {name for kernel in program.kernels for name in (kernel.image, kernel.ptx) if name}
        return sum(len(self._entries[name]) for name in names)

    def add_graph(self, model: bytes) -> None:
        """Add the rewritten graph, a serialised ONNX model whose weights are external."""
        self._entries["graph.onnx"] = model

    def add_golden(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Add what ``make_golden`` returned."""
        self._entries["golden.safetensors"] = pack_arrays(arrays)

    def add_build_report(self, report: Mapping[str, Any]) -> None:
        """Add what the build decided and how long it took; must be JSON-able."""
        self._entries["build_report.json"] = json.dumps(report, indent=1).encode()

    def write_weights(self, sources: Iterable[PackedSource], progress: Progress | None = None) -> None:
        """Stream all weights into rank0.safetensors; checks the free space first."""
        ordered = list(sources)
        total = sum(source.nbytes for source in ordered)
        with self._writing():
            free = shutil.disk_usage(self.path).free
            if free < total:
                raise BuildError(
                    f"the weights need {total / 1e6:,.1f} MB and {self.path.parent} has {free / 1e6:,.1f} MB "
                    "free. Free some space or choose another --output-dir."
                )
            size, digest = write_weights(self.path / WEIGHTS_FILE, ordered, progress)
            self._files[WEIGHTS_FILE] = FileRecord(size=size, sha256=digest)

    def copy_tokenizer(self, model_dir: str | os.PathLike[str]) -> list[str]:
        """Copy tokenizer, chat template and generation config where the checkpoint has them; return their
        names.
        """
        copied = []
        with self._writing():
            for source, name in COPIED.items():
                file = Path(model_dir) / source
                if file.is_file():
                    self._write_file(name, file.read_bytes())
                    copied.append(name)
        return copied

    def add_file(self, name: str, data: bytes) -> None:
        """Add one of the files of ``COPIED`` that does not lie in a folder (a GGUF's tokenizer, say)."""
        if name not in COPIED.values():
            raise BuildError(
                f"{name!r} is not a file that an engine may hold; expected one of {[*COPIED.values()]}."
            )
        with self._writing():
            self._write_file(name, data)

    def finish(
        self,
        *,
        model: ModelIdentity,
        special_tokens: SpecialTokens,
        memory_plan: Sequence[MemoryRow],
    ) -> Manifest:
        """Write rank0.engine and the manifest; afterwards ``path`` is a complete engine."""
        if not self._programs or WEIGHTS_FILE not in self._files:
            raise BuildError("an engine needs at least one program and the weights before it is finished.")
        limits = {program.limits for program in self._programs.values()}
        vocab_sizes = {program.vocab_size for program in self._programs.values()}
        if len(limits) != 1 or vocab_sizes != {special_tokens.vocab_size}:
            raise BuildError("all targets of an engine must share limits and vocabulary size.")
        if special_tokens.vocab_size_used > special_tokens.vocab_size:
            raise BuildError(
                f"the tokenizer's {special_tokens.vocab_size_used} tokens are more than the "
                f"{special_tokens.vocab_size} columns of the logits; clip vocab_size_used."
            )
        golden = self._golden_summary(special_tokens.vocab_size)
        with self._writing():
            file = self.path / PROGRAM_FILE
            entries = write_container(file, self._entries)
            data = file.read_bytes()
            self._files[PROGRAM_FILE] = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
            self._manifest = Manifest(
                format_version="{}.{}".format(*FORMAT_VERSION),
                castiron_version=castiron.__version__,
                model=model,
                targets=list(self._programs),
                limits=limits.pop(),
                max_lora_rank=max(
                    0 if program.adapters is None else program.adapters.rank
                    for program in self._programs.values()
                ),
                memory_plan=list(memory_plan),
                special_tokens=special_tokens,
                golden=golden,
                files=dict(sorted(self._files.items())),
                entries=entries,
            )
            self._write_manifest(self._manifest)
        return self._manifest

    def record_verification(self, verification: Verification) -> Manifest:
        """Store in the manifest what the comparison of the finished engine with its golden outputs gave."""
        if self._manifest is None or self._manifest.golden is None:
            raise BuildError("only a finished engine with golden outputs can record a verification.")
        golden = self._manifest.golden.model_copy(update={"verification": verification})
        self._manifest = self._manifest.model_copy(update={"golden": golden})
        with self._writing():
            self._write_manifest(self._manifest)
        return self._manifest

    def record_quantization(self, quantization: Quantization) -> Manifest:
        """Store in the manifest of the finished engine what was quantized and what that cost."""
        if self._manifest is None:
            raise BuildError("only a finished engine can record its quantization.")
        self._manifest = self._manifest.model_copy(update={"quantization": quantization})
        with self._writing():
            self._write_manifest(self._manifest)
        return self._manifest

    def _golden_summary(self, vocab_size: int) -> GoldenSummary | None:
        data = self._entries.get("golden.safetensors")
        if data is None:
            return None
        sequences = read_golden(unpack_arrays(data, "golden.safetensors"), vocab_size)
        prefill, decode = count_rows(sequences)
        return GoldenSummary(sequences=len(sequences), prefill_rows=prefill, decode_rows=decode)

    def _write_manifest(self, manifest: Manifest) -> None:
        _write_synced(self.path / MANIFEST, (manifest.model_dump_json(indent=2) + "\n").encode())

    def _write_file(self, name: str, data: bytes) -> None:
        _write_synced(self.path / name, data)
        self._files[name] = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    def _put_in_place(self) -> None:
        _sync_folder(self.path)
        check_output_dir(self.output_dir, self.overwrite)
        old = self.path.with_name(self.path.name + ".old")
        moved = self.output_dir.exists()
        if moved:
            os.rename(self.output_dir, old)
        try:
            os.rename(self.path, self.output_dir)
        except BaseException:
            if moved:
                os.rename(old, self.output_dir)
            raise
        _sync_folder(self.output_dir.parent)
        if moved:
            shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BuildError(_explain(error, self.output_dir)) from error


def check_output_dir(output_dir: Path, overwrite: bool) -> None:
    """Raise BuildError unless an engine may be written to ``output_dir``: absent, empty, or an engine to
    replace.
    """
    if output_dir.is_symlink() or (output_dir.exists() and not output_dir.is_dir()):
        raise BuildError(f"{output_dir} exists and is not a folder. Choose another --output-dir.")
    try:
        content = os.listdir(output_dir)
    except FileNotFoundError:
        content = []
    except OSError as error:
        raise BuildError(_explain(error, output_dir)) from error
    if content and not _is_engine(output_dir):
        raise BuildError(
            f"{output_dir} holds files and is not an engine; it is left alone. Choose another --output-dir."
        )
    if content and not overwrite:
        raise BuildError(f"{output_dir} holds an engine already. Give --overwrite to replace it.")
    parent = next(folder for folder in output_dir.absolute().parents if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):  # the engine is renamed into it
        reason = PermissionError(errno.EACCES, f"{parent} is read-only, or another user's")
        raise BuildError(_explain(reason, output_dir))


def _is_engine(folder: Path) -> bool:
    try:
        with open(folder / MANIFEST, "rb") as file:
            raw = json.loads(file.read(1 << 24))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.get("format") == "castiron-engine"


def _explain(error: OSError, output_dir: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = 0
        with suppress(OSError):
            free = shutil.disk_usage(output_dir.parent).free
        return (
            f"the disk is full: {output_dir.parent} has {free / 1e6:,.1f} MB left. Nothing was kept; free "
            "some space or choose another --output-dir."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{output_dir} cannot be written ({error.strerror}). Choose an --output-dir in a folder that you "
            "may write to."
        )
    return f"writing {output_dir} failed: {error.strerror or error} ({error.filename or 'no file named'})."


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
