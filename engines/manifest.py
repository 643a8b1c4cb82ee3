"""The manifest (``config.json``): what an engine says about itself, and the version policy of the format."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, Literal

from pydantic import Field

from castiron.errors import EngineError

from .program import Limits
from .quantization import Quantization
from .schema import Bytes, Schema, Sha256, Text

#: The format that this castiron writes. A reader takes any minor up to its own, of its own major.
FORMAT_VERSION = (1, 6)
#: The formats that it reads, for messages.
_READABLE = "{0}.0 to {0}.{1}".format(*FORMAT_VERSION)
#: One spelling for each version: "1.04" would be another text for the same.
_VERSION = r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})"

#: What a build is told, where the other limit follows from it.
_CHOSEN_LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens")
#: An option's value that needs no quotes.
_WORD = re.compile(r"[a-z0-9_,-]{1,100}")

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
EntryName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_./-]{0,255}$")]
Token = Annotated[int, Field(ge=0, le=1 << 24)]
Version = Annotated[str, Field(pattern=f"^{_VERSION}$")]


class ModelIdentity(Schema):
    """Which checkpoint the engine was cast from."""

    name: Text
    #: What the user gave to ``castiron build``: a folder or a hub id; appears in rebuild hints.
    source: Text
    architecture: Text
    model_type: Text
    #: Of the checkpoint's config.json.
    config_sha256: Sha256
    #: Of the checkpoint's table of tensors (file names, sizes, headers): tells two checkpoints apart cheaply.
    source_sha256: Sha256
    source_dtype: Text
    #: What weights are stored as in the engine.
    dtype: Literal["float32", "bfloat16", "float16"]
    parameters: Bytes


class SpecialTokens(Schema):
    """Token ids that the runtime needs without a tokenizer."""

    eos_token_ids: Annotated[list[Token], Field(max_length=256)] = Field(default_factory=list)
    bos_token_id: Token | None = None
    pad_token_id: Token | None = None
    #: Columns of the logits.
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)]
    #: Rows that the tokenizer knows; the padded columns behind them are never sampled.
    vocab_size_used: Annotated[int, Field(ge=1, le=1 << 24)]


class MemoryRow(Schema):
    """One line of the memory plan."""

    item: Text
    bytes: Bytes
    note: Text = ""


class Verification(Schema):
    """What the comparison with the golden outputs gave."""

    passed: bool
    max_abs_error: Annotated[float, Field(ge=0)]
    mean_kl: float
    top1_agreement: Annotated[float, Field(ge=0, le=1)]
    rows: Annotated[int, Field(ge=0)]


class GoldenSummary(Schema):
    """What golden.safetensors holds; ``verification`` is the build's own comparison."""

    sequences: Annotated[int, Field(ge=1, le=64)]
    prefill_rows: Annotated[int, Field(ge=0, le=1 << 20)]
    decode_rows: Annotated[int, Field(ge=0, le=1 << 20)]
    verification: Verification | None = None


class FileRecord(Schema):
    """Size and hash of a file in the folder, or of an entry of rank0.engine."""

    size: Bytes
    sha256: Sha256


class Manifest(Schema):
    """The whole of ``config.json``."""

    format: Literal["castiron-engine"] = "castiron-engine"
    format_version: Version
    castiron_version: Text
    model: ModelIdentity
    targets: Annotated[
        list[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]], Field(min_length=1, max_length=32)
    ]
    limits: Limits
    #: Of LoRA adapters on GPU targets, at most; 0: they take none.
    max_lora_rank: Annotated[int, Field(ge=0, le=512)] = 0
    #: None: weights, activations and cache are all of ``model.dtype``.
    quantization: Quantization | None = None
    memory_plan: Annotated[list[MemoryRow], Field(max_length=1024)]
    special_tokens: SpecialTokens
    golden: GoldenSummary | None = None
    files: Annotated[dict[FileName, FileRecord], Field(max_length=64)]
    entries: Annotated[dict[EntryName, FileRecord], Field(max_length=4096)]

    @property
    def recipe(self) -> str | None:
        """Of its quantization; None without any."""
        return None if self.quantization is None else self.quantization.recipe


def check_format(raw: Any, where: str) -> None:
    """Apply the version policy to a parsed ``config.json``, before anything else in it is looked at.

    Raises EngineError when it is no castiron engine, or one of a format that this castiron does not read.
    """
    if not isinstance(raw, dict) or raw.get("format") != "castiron-engine":
        raise EngineError(
            f"{where} is not a castiron engine: its config.json has no format 'castiron-engine'."
        )
    found = raw.get("format_version")
    parts = re.fullmatch(_VERSION, found) if isinstance(found, str) else None
    if parts is None:
        raise EngineError(
            f"{where}: format_version is {repr(found)[:40]}; expected 'major.minor' without leading zeros, "
            f"{_READABLE}. Rebuild the engine."
        )
    major, minor = int(parts[1]), int(parts[2])
    if major == FORMAT_VERSION[0] and minor <= FORMAT_VERSION[1]:
        return
    tool = _short(raw.get("castiron_version"))
    if (major, minor) > FORMAT_VERSION:
        remedy = f"upgrade castiron (the engine was built by {tool}), or rebuild it with this one:"
    else:
        remedy = "rebuild the engine:"
    raise EngineError(
        f"{where} has engine format {found}; this castiron reads {_READABLE}. To fix it, {remedy} "
        f"{rebuild_command(raw, where)}"
    )


def rebuild_command(raw: dict[str, Any], where: str) -> str:
    """Return the command that builds this engine again, from whatever of its manifest can be read.

    Options that follow it are added to its targets, and take the place of its other options.
    """
    source = _at(raw, "model", "source")
    shown = shlex.quote(source) if isinstance(source, str) and source.isprintable() and source else "MODEL"
    targets = raw.get("targets")
    options = {
        "target": ",".join(map(str, targets)) if isinstance(targets, list) else "",
        "dtype": _at(raw, "model", "dtype"),
        **{name.replace("_", "-"): _at(raw, "limits", name) for name in _CHOSEN_LIMITS},
        "max-lora-rank": raw.get("max_lora_rank") or "",
        "quantize": _at(raw, "quantization", "recipe"),
        "kv-cache-dtype": _at(raw, "quantization", "kv_cache_dtype"),
    }
    if _at(raw, "quantization", "origin") != "recipe" or options["quantize"] == "none":
        del options["quantize"]  # the checkpoint is quantized itself
    if options["kv-cache-dtype"] not in ("fp8", "int8"):
        del options["kv-cache-dtype"]
    given = [f"--{name} {value}" for name, value in options.items() if _WORD.fullmatch(str(value))]
    return " ".join([f"castiron build {shown} --output-dir {shlex.quote(where)} --overwrite", *given])


def _at(raw: dict[str, Any], section: str, name: str) -> Any:
    found = raw.get(section)
    value = found.get(name) if isinstance(found, dict) else None
    return "" if value is None else value


def _short(value: Any) -> str:
    text = f"castiron {value}" if isinstance(value, str) and value.isprintable() else "another castiron"
    return text[:60]
