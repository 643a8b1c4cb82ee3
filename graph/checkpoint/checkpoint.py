"""A checkpoint: config, tensors by name, and the rules that tie the two to the transformers model."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from castiron.errors import CheckpointError, UnsupportedModelError

from ..files import FileReader
from .config import eos_token_ids, other_model_code, read_config, read_generation_config
from .locate import locate
from .names import ModelNames, StoredNames, ignorable_reason, model_names, spellings, stored_names
from .quantized import MadeTensor, Read, read_quantized
from .safetensors_file import TensorInfo
from .shards import read_shards

#: Piece size for whole-tensor comparisons: large enough for the disk, small beside any working set.
_COMPARE_BYTES: Final = 8 << 20
#: What a parameter may be stored as; anything narrower needs scales, which quantized checkpoints keep apart.
_WEIGHT_DTYPES: Final = ("float64", "float32", "float16", "bfloat16")


#: A stored tensor, or a parameter that is made of several.
Tensor: TypeAlias = TensorInfo | MadeTensor


@dataclass(frozen=True)
class AccountReport:
    """Where every stored tensor went: used by the graph, or left out for a reason."""

    used: tuple[str, ...]
    ignored: Mapping[str, str]


class Checkpoint:
    """An open checkpoint. Tensors are read on demand, by row ranges, into memory of the caller.

    ``source``      what the user named (folder, GGUF file or hub id)
    ``folder``      the folder that is read: the source, or its converted form
    ``config``      config.json, ``generation_config`` likewise ({} when there is none)
    ``tensors``     every stored tensor that counts, by stored name; of a quantized parameter, which is stored
                    as codes, scales and more, one float32 tensor "<module>.weight" in their place
    ``quantization``  what a quantized checkpoint says of itself, None of another
    ``eos_token_ids``  every token that ends a sequence
    ``notes``       sentences for the user: files left out, conversions, ties
    """

    def __init__(self, source: str, folder: Path, notes: tuple[str, ...] = ()) -> None:
        self.source = source
        self.folder = folder
        self.config: Mapping[str, Any] = MappingProxyType(read_config(folder))
        self.generation_config: Mapping[str, Any] = MappingProxyType(read_generation_config(folder))
        self._files = FileReader()
        shards = read_shards(folder)
        self.quantization = read_quantized(folder, self.config, shards.tensors, self._files)
        self.tensors: Mapping[str, Tensor] = MappingProxyType(_parameters(shards.tensors, self.quantization))
        self._stored = _files_of(shards.tensors, self.quantization)
        self.eos_token_ids, eos_notes = eos_token_ids(self.config, self.generation_config)
        told = self.quantization.notes if self.quantization else ()
        self.notes: list[str] = [*notes, *shards.notes, *told, *eos_notes]

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Open a Hugging Face folder, a GGUF file, or a hub id.

        Folders with only ``pytorch_model.bin`` and GGUF files are converted, without loss, into a cached
        safetensors folder; ``notes`` says so. Raises ``CheckpointError`` for anything incomplete or
        inconsistent.
        """
        located = locate(source)
        return cls(str(source), located.folder, located.notes)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Reading afterwards opens them again."""
        self._files.close()
        self._files = FileReader()

    # -- tensors ---------------------------------------------------------------------------------------------

    def info(self, name: str) -> Tensor:
        """The stored tensor ``name``."""
        try:
            return self.tensors[name] if name in self.tensors else self._stacked[name]
        except KeyError:
            close = difflib.get_close_matches(name, self.tensors, n=3)
            hint = f"; it has {', '.join(close)}" if close else ""
            raise CheckpointError(f"{self.folder}: has no tensor {name!r}{hint}.") from None

    def read(
        self,
        name: str,
        start: int | None = None,
        stop: int | None = None,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Rows ``[start, stop)`` of axis 0, in the stored dtype; the whole tensor by default.

        Of a quantized parameter: the dequantized numbers; of experts that are stored one by one: all of them.

        ``out`` is a C-contiguous array of the right dtype and of at least the size needed; its beginning is
        filled and returned as a view, so that one buffer serves many reads.
        """
        tensor = self.info(name)
        if isinstance(tensor, MadeTensor):
            return _made_rows(tensor, start, stop, out)
        if not tensor.shape:
            if start is not None or stop is not None:
                raise ValueError(f"{name} is a scalar; it has no rows")
            shape: tuple[int, ...] = ()
            offset = tensor.offset
        else:
            rows = tensor.shape[0]
            start, stop = 0 if start is None else start, rows if stop is None else stop
            if not 0 <= start <= stop <= rows:
                raise ValueError(f"{name} has {rows} rows; asked for [{start}, {stop})")
            shape = (stop - start, *tensor.shape[1:])
            offset = tensor.offset + start * (tensor.nbytes // rows if rows else 0)
        count = int(np.prod(shape, dtype=np.int64))
        if out is None:
            out = np.empty(shape, tensor.dtype)
        elif out.dtype != tensor.dtype or out.size < count or not out.flags.c_contiguous:
            raise ValueError(f"{name}: out must be contiguous {tensor.dtype} of at least {count} elements")
        else:
            out = out.reshape(-1)[:count].reshape(shape)
        if count:
            self._files.read_into(tensor.file, offset, out)
        return out

    def row_chunks(self, name: str, max_bytes: int) -> Iterator[tuple[int, int]]:
        """Row ranges that cover axis 0 in pieces of at most ``max_bytes`` (at least one row)."""
        tensor = self.info(name)
        rows = tensor.shape[0]
        step = max(1, max_bytes // max(1, tensor.nbytes // max(1, rows)))
        for start in range(0, rows, step):
            yield start, min(rows, start + step)

    # -- the transformers model ------------------------------------------------------------------------------

    @cached_property
    def hf_config(self) -> Any:
        """The config as transformers reads it (class defaults filled in)."""
        from transformers import AutoConfig  # imports torch's neighbourhood; only builds come here

        try:
            config = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds on a config it does not like
            raise UnsupportedModelError(
                f"{self.folder / 'config.json'}: transformers rejects it: {_first_lines(error)}"
            ) from error
        for name in ("quantization_config", "compression_config"):  # ours to read: see ``quantization``
            if hasattr(config, name):
                delattr(config, name)
        return config

    @cached_property
    def model_class(self) -> type[Any]:
        """The transformers class that generates text with this config."""
        from transformers import AutoModelForCausalLM

        mapping: Mapping[type[Any], Any] = AutoModelForCausalLM._model_mapping
        try:
            found = cast("type[Any]", mapping[type(self.hf_config)])
        except KeyError:
            raise UnsupportedModelError(
                f"{self.folder}: model_type {self.config['model_type']!r} has no text-generation class in "
                "transformers; castiron builds decoder language models."
            ) from None
        self.notes += other_model_code(self.config, found.__name__)
        return found

    @cached_property
    def names(self) -> ModelNames:
        """The naming rules of the architecture."""
        return model_names(self.model_class, str(self.hf_config.model_type))

    @cached_property
    def _stored_names(self) -> StoredNames:
        return stored_names(self.tensors, self.names)

    @cached_property
    def _stacked(self) -> dict[str, MadeTensor]:
        """Parameters of all experts of a layer, which are stored one by one."""
        return {
            name: MadeTensor.of_experts(name, [[self.tensors[part] for part in expert] for expert in experts])
            for name, experts in self._stored_names.stacked.items()
        }

    @property
    def made(self) -> dict[str, MadeTensor]:
        """Parameters that are made of several stored tensors, by name."""
        quantized = self.quantization.tensors if self.quantization else ()
        return {**{tensor.name: tensor for tensor in quantized}, **self._stacked}

    def _lookup(self, parameter: str) -> Tensor | None:
        for spelling in spellings(parameter, self.names.base_prefix):
            stored = self._stored_names.whole.get(spelling)
            if stored is not None:
                return self.tensors[stored]
            if spelling in self._stacked:
                return self._stacked[spelling]
        return None

    @cached_property
    def _tie_partners(self) -> dict[str, str]:
        """Both directions of every tied pair; empty when nothing is tied."""
        flag = bool(getattr(self.hf_config, "tie_word_embeddings", False))
        origin = "config.json says" if "tie_word_embeddings" in self.config else "config default is"
        partners: dict[str, str] = {}
        for target, source in self.names.tied.items():
            if set(target) & set("*[(\\"):
                continue  # a pattern over inner layers: those parameters are stored like all others
            head, embedding = self._lookup(target), self._lookup(source)
            stated = f"{self.folder}: {origin} tie_word_embeddings={str(flag).lower()}"
            if not flag:
                if (head is None) != (embedding is None):
                    here, absent = (source, target) if head is None else (target, source)
                    raise CheckpointError(
                        f"{stated}, but only {here!r} is stored and {absent!r} is not. If the model ties its "
                        'head to the embedding, set "tie_word_embeddings": true; else a tensor is missing.'
                    )
                continue
            if head is not None and embedding is not None:
                if not self._equal(head, embedding):
                    raise CheckpointError(
                        f"{stated}, but {head.name!r} and {embedding.name!r} are both stored and differ. Set "
                        '"tie_word_embeddings": false if the head is its own, or remove the wrong tensor.'
                    )
                self.notes.append(f"{head.name} equals {embedding.name} and is tied to it")
            partners[target], partners[source] = source, target
        return partners

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding; decided from the config and the tensors."""
        return bool(self._tie_partners)

    def resolve(self, parameter: str) -> Tensor:
        """The stored tensor behind a parameter or persistent buffer of the transformers model.

        Takes transformers' renamings, a left-out base-model prefix and ties into account. Of a tied pair both
        names resolve to the same tensor: the embedding's, if stored. ``CheckpointError`` if there is none.
        """
        partner = self._tie_partners.get(parameter)
        candidates = [parameter] if partner is None else [parameter, partner]
        if partner is not None and parameter in self.names.tied:
            candidates.reverse()
        for candidate in candidates:
            found = self._lookup(candidate)
            if found is not None:
                if found.dtype.name not in _WEIGHT_DTYPES:
                    raise CheckpointError(
                        f"{self.folder}: tensor {found.name!r} is stored as {found.dtype.name}, and neither "
                        f"config.json nor a scale beside it says what that means; expected one of "
                        f"{', '.join(_WEIGHT_DTYPES)}. Config or weights are incomplete: download them again."
                    )
                return found
        wanted = " or ".join(map(repr, candidates))
        close = ", ".join(difflib.get_close_matches(parameter, self._stored, n=3)) or "nothing alike"
        if self.quantization is None and f"{parameter}_blocks" in self.tensors:
            close += (
                '; blocks and scales of MXFP4 want "quantization_config": {"quant_method": "mxfp4"} there'
            )
        raise CheckpointError(
            f"{self.folder}: no stored tensor for the parameter {wanted} of {self.names.class_name}; found "
            f"{close}. The checkpoint is incomplete, or config.json belongs to another model."
        )

    def resolve_like(self, parameter: str, shape: Collection[int]) -> Tensor:
        """``resolve``, and ``CheckpointError`` if the stored tensor has another shape than the model's."""
        stored = self.resolve(parameter)
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"{self.folder}: tensor {stored.name!r} has shape {list(stored.shape)}, config.json makes "
                f"the parameter {parameter!r} {list(shape)}. Config and weights are of different models."
            )
        return stored

    def account(
        self, used: Collection[str], unused_parameters: Mapping[str, str] | None = None
    ) -> AccountReport:
        """Check that every stored tensor is used or known to be ignorable.

        ``used`` are stored names (``resolve(...).name``). ``unused_parameters`` are stored names that
        belong to the model but play no part in its logits, with the reason, found by the caller. Raises
        ``CheckpointError`` naming what is missing or left over.
        """
        used = {
            part
            for name in used
            for part in itertools.chain(*self._stored_names.stacked.get(name, ((name,),)))
        }
        missing = sorted(used - set(self.tensors))
        if missing:
            raise CheckpointError(
                f"{self.folder}: the model uses tensors that are not stored: {_some(missing)}."
            )
        ignored: dict[str, str] = {}
        unknown: list[str] = []
        excused = unused_parameters or {}
        copies = self._tied_copies()
        for name in sorted(set(self.tensors) - used):
            reason = (
                excused.get(name)
                or copies.get(name)
                or ignorable_reason(name, self.tensors[name].shape, self.config, self.names)
            )
            if reason is None:
                unknown.append(name)
            else:
                ignored[name] = reason
        if unknown:
            raise CheckpointError(
                f"{self.folder}: {len(unknown)} stored tensors have no place in {self.names.class_name}: "
                f"{_some(unknown)}. config.json may belong to another model; one that needs them would be "
                "wrong without them. Remove them if they are not part of the model."
            )
        return AccountReport(tuple(sorted(used)), MappingProxyType(ignored))

    def _tied_copies(self) -> dict[str, str]:
        """Stored tensors that ``resolve`` never gives because they repeat the one they are tied to."""
        copies = {}
        for parameter in self._tie_partners:
            stored, kept = self._lookup(parameter), self.resolve(parameter)
            if stored is not None and stored.name != kept.name:
                copies[stored.name] = f"copy of the tied {kept.name}"
        return copies

    def _equal(self, first: Tensor, second: Tensor) -> bool:
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        return all(
            self.read(first.name, *rows).tobytes() == self.read(second.name, *rows).tobytes()
            for rows in self.row_chunks(first.name, _COMPARE_BYTES)
        )

    # -- facts for the manifest ------------------------------------------------------------------------------

    @property
    def source_dtype(self) -> str:
        """What most numbers are stored as: a dtype, or what the codes of a quantized parameter are."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            kind = tensor.kind if isinstance(tensor, MadeTensor) else tensor.dtype.name
            sizes[kind] += tensor.size
        return sizes.most_common(1)[0][0]

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the config and every tensor's name, dtype, shape and place; weights are not read."""
        digest = hashlib.sha256(json.dumps(dict(self.config), sort_keys=True).encode())
        for name, tensor in sorted(self._stored.items()):
            digest.update(
                repr((name, tensor.dtype.name, tensor.shape, tensor.file.name, tensor.offset)).encode()
            )
        return digest.hexdigest()


def _parameters(stored: Mapping[str, TensorInfo], quantized: Read | None) -> dict[str, Tensor]:
    """Tensors by the names of parameters: quantized ones in place of what they are made of."""
    if quantized is None:
        return dict(stored)
    made = {tensor.name: tensor for tensor in quantized.tensors}
    used = quantized.used.union(*({part.name for part in tensor.sources} for tensor in quantized.tensors))
    clash = sorted(made.keys() & stored.keys() - used)
    if clash:
        raise CheckpointError(
            f"parameter {clash[0]!r} is stored twice: as it is, and as codes. Keep one of them."
        )
    return {**{name: tensor for name, tensor in stored.items() if name not in used}, **made}


def _files_of(stored: Mapping[str, TensorInfo], quantized: Read | None) -> dict[str, TensorInfo]:
    """Every tensor that lies in a file, those of a GGUF file included."""
    sources = [part for tensor in quantized.tensors for part in tensor.sources] if quantized else []
    return {**{tensor.name: tensor for tensor in sources}, **stored}


def _made_rows(
    tensor: MadeTensor, start: int | None, stop: int | None, out: npt.NDArray[Any] | None
) -> npt.NDArray[Any]:
    rows = tensor.shape[0]
    start, stop = 0 if start is None else start, rows if stop is None else stop
    if not 0 <= start <= stop <= rows:
        raise ValueError(f"{tensor.name} has {rows} rows; asked for [{start}, {stop})")
    shape = (stop - start, *tensor.shape[1:])
    count = int(np.prod(shape, dtype=np.int64))
    if out is None:
        out = np.empty(shape, tensor.dtype)
    elif out.dtype != tensor.dtype or out.size < count or not out.flags.c_contiguous:
        raise ValueError(f"{tensor.name}: out must be contiguous float32 of at least {count} elements")
    out = out.reshape(-1)[:count].reshape(shape)
    tensor.expr.fill(start, stop, out)
    return out


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _first_lines(error: BaseException) -> str:
    # The first line of transformers' validators names the field alone; what is wrong with it comes after.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or type(error).__name__
