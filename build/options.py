"""What a build may be told, and the limits that follow from it and from the model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from castiron.errors import BuildError

from ..calibration import QuantizationOptions
from ..engines.program import Limits
from ..plugins import TARGETS
from .gpus import present_gpus

#: Longest default context: beyond it the KV cache of a full batch outgrows ordinary machines.
DEFAULT_MAX_SEQ_LEN = 8192
#: Default tokens of a step: a prefill chunk large enough to be bound by arithmetic, small enough that the
#: activations stay in the tens of megabytes and that decoding requests do not wait long behind it.
DEFAULT_MAX_NUM_TOKENS = 1024
DEFAULT_MAX_BATCH_SIZE = 64
_LEAST_LOGIT_ROWS = 64
#: Of adapters on GPUs: at most, and what matrix instructions take at a time.
MAX_LORA_RANK, RANK_STEP = 512, 16
_INTEGERS = (
    *("max_batch_size", "max_seq_len", "max_num_tokens", "max_logit_rows"),
    *("max_lora_rank", "num_threads"),
)
DTYPES = ("bfloat16", "float32", "float16")
#: PTX for architectures to come; rides along with every other CUDA target.
FALLBACK = "compute_80"


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build; None leaves a limit to the model and the defaults.

    Attributes:
        targets: what the engine runs on, names of ``plugins.TARGETS``; "auto" is host and this machine's GPU.
        dtype: storage of matrices and of the KV cache; vectors are always float32. Engines with a CUDA target
            take bfloat16 or float16, those with host bfloat16 or float32.
        ptx: with a CUDA target, also build PTX that drivers compile for architectures to come.
        max_batch_size: requests that run at once.
        max_seq_len: tokens of one request, prompt and answer together.
        max_num_tokens: tokens of one step over all requests.
        max_logit_rows: rows of logits in one step; at least one per running request.
        verify: "auto" compares the finished engine with the source model unless its weights are larger than
            a build may hold in memory; "always" and "never" decide it.
        overwrite: replace an engine that is already there.
        dry_run: stop after the plan; nothing is written.
        dump_graph: folder for the graph after every pass.
        plugins: plugin files, in the order of their patterns (docs/plugins.md).
        quantization: what is quantized to what, and how accurate it must be (docs/quantization.md).
        activations: "auto" lets the host round the activations of products whose weights alone are quantized
            to int8, in groups of 32; "full" keeps them as they are.
        max_lora_rank: GPU targets take LoRA adapters of ranks up to this, rounded up to a multiple of 16;
            None: they take none. Host takes adapters of any rank without it.
        num_threads: threads of the comparison at the end.
    """

    targets: tuple[str, ...] = ("host",)
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    ptx: bool = True
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    max_logit_rows: int | None = None
    verify: Literal["auto", "always", "never"] = "auto"
    overwrite: bool = False
    dry_run: bool = False
    dump_graph: Path | None = None
    plugins: tuple[Path, ...] = ()
    quantization: QuantizationOptions = field(default_factory=QuantizationOptions)
    activations: Literal["auto", "full"] = "auto"
    max_lora_rank: int | None = None
    num_threads: int | None = None

    def check(self) -> None:
        """Raise BuildError for options that make no sense whatever the model is."""
        known = (*TARGETS, "auto")
        if not self.targets:
            raise BuildError(f"no target given; expected one or more of {', '.join(known)}")
        for target in self.targets:
            check_target(target, known)
        if self.dtype not in DTYPES:
            raise BuildError(f"unknown dtype {self.dtype!r}; expected one of {', '.join(DTYPES)}")
        self._check_dtype()
        if self.activations not in ("auto", "full"):
            raise BuildError(f"activations is {self.activations!r}; expected auto or full")
        self.quantization.check()
        if self.verify not in ("auto", "always", "never"):
            raise BuildError(f"verify is {self.verify!r}; expected auto, always or never")
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise BuildError(f"{name} is {value!r}; expected an integer of at least 1")
        self._check_lora_rank()

    def _check_lora_rank(self) -> None:
        if self.max_lora_rank is None:
            return
        if self.max_lora_rank > MAX_LORA_RANK:
            raise BuildError(f"max_lora_rank is {self.max_lora_rank}; expected at most {MAX_LORA_RANK}")
        targets = self.resolved_targets()
        if all(target == "host" for target in targets):
            raise BuildError(
                f"max_lora_rank is {self.max_lora_rank}, and the targets are {', '.join(targets)}: it is for "
                "GPUs, host takes adapters of any rank; leave it out, or add a GPU target"
            )

    @property
    def lora_rank(self) -> int:
        """Of adapters on GPUs, as programs have it; 0: they take none."""
        return -(-(self.max_lora_rank or 0) // RANK_STEP) * RANK_STEP

    def _check_dtype(self) -> None:
        targets = self.resolved_targets()
        if self.dtype == "float16" and "host" in targets:
            raise BuildError(
                f"the targets are {', '.join(targets)} and the dtype is float16, which host does not compute "
                "with; build with --dtype bfloat16, or without host"
            )
        on_gpu = [target for target in targets if TARGETS[target].family == "cuda"]
        if self.dtype == "float32" and on_gpu:
            raise BuildError(
                f"the targets are {', '.join(targets)} and the dtype is float32, which the matrix units of "
                f"{on_gpu[0]} do not take; build with --dtype bfloat16 or float16, or for host alone"
            )

    def resolved_targets(self) -> tuple[str, ...]:
        """Targets with "auto" replaced, and with the PTX that rides along; each once."""
        named: list[str] = []
        for target in self.targets:
            named += ["host", *present_gpus()] if target == "auto" else [target]
        if self.ptx and any(TARGETS[target].family == "cuda" for target in named):
            named.append(FALLBACK)
        return tuple(dict.fromkeys(named))


def check_target(target: str, known: Sequence[str] = tuple(TARGETS)) -> None:
    """Raise BuildError for a target that castiron does not know, with the one that was probably meant."""
    if target not in known:
        close = difflib.get_close_matches(target, known, 1, 0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise BuildError(f"unknown target {target!r}; this castiron builds for {', '.join(known)}{hint}")


def context_length(hf_config: Any) -> int | None:
    """The longest sequence that the model's config allows, or None where it sets no bound."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(hf_config, name, None)
        if isinstance(value, int):
            return value
    return None


def resolve_limits(options: BuildOptions, hf_config: Any) -> Limits:
    """The limits of the engine. Raises BuildError for combinations that cannot work, naming both sides."""
    options.check()
    longest = context_length(hf_config)
    seq_len = options.max_seq_len or min(longest or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN)
    if longest is not None and seq_len > longest:
        raise BuildError(
            f"max_seq_len is {seq_len}, but the model's config allows {longest} positions; "
            f"give --max-seq-len {longest} or less"
        )
    batch = options.max_batch_size
    most_useful = batch * seq_len
    tokens = options.max_num_tokens or min(max(DEFAULT_MAX_NUM_TOKENS, batch), most_useful)
    if tokens < batch:
        raise BuildError(
            f"max_num_tokens is {tokens} and max_batch_size is {batch}: a step decodes one token of every "
            f"running request, so max_num_tokens must be at least {batch}"
        )
    rows = options.max_logit_rows or min(max(batch, _LEAST_LOGIT_ROWS), tokens)
    if rows < batch:
        raise BuildError(
            f"max_logit_rows is {rows} and max_batch_size is {batch}: every running request needs a row of "
            f"logits, so max_logit_rows must be at least {batch}"
        )
    if rows > tokens:
        raise BuildError(
            f"max_logit_rows is {rows}, more than the {tokens} tokens of a step (max_num_tokens)"
        )
    try:
        return Limits(max_batch_size=batch, max_num_tokens=tokens, max_logit_rows=rows, max_seq_len=seq_len)
    except ValidationError as error:
        found = [f"{one['loc'][0]} is {one['input']}: {one['msg']}" for one in error.errors()]
        raise BuildError(f"the limits are out of range: {'; '.join(found)}") from None
