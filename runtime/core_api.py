"""The C++ core as Python sees it (``runtime/_core``); tests put a Python twin in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from array import array

    import numpy as np
    import numpy.typing as npt

    from .devices import DeviceChoice


class CoreLogprobs(Protocol):
    """Log-probabilities at one token's place."""

    logprob: float
    top: Sequence[tuple[int, float]]


class CoreBeam(Protocol):
    """A text that a beam search found."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    cumulative_logprob: float
    score: float
    stop_token_id: int | None


class CoreEvent(Protocol):
    """What one or more steps did for one request.

    The token that ended a request is ``stop_token_id``, not one of ``token_ids``.
    """

    request_id: int
    token_ids: Sequence[int]
    logprobs: Sequence[CoreLogprobs]
    finished: bool
    finish_reason: str
    stop_token_id: int | None
    error: str
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float
    first_token_seconds: float
    seconds: float
    beams: Sequence[CoreBeam]
    prompt_logprobs: Sequence[CoreLogprobs]
    context_logits: npt.NDArray[np.float32] | None
    generation_logits: npt.NDArray[np.float32] | None


class Core(Protocol):
    """``_core.Engine``: one C++ thread runs the steps; ``poll`` is for one thread, the rest for any."""

    def submit(
        self,
        prompt: array[int] | npt.NDArray[np.int32],
        params: Any,
        priority: int = 0,
        cache_salt: bytes = b"",
        adapter: int = 0,
    ) -> int:
        """Queue a request; raises ValueError with a message for the user.

        Args:
            prompt: int32 [tokens].
            priority: smaller numbers are served first.
            cache_salt: 16 bytes, a digest of who may share cached prefixes; empty = everybody without one.
            adapter: of ``add_adapter``; 0 = none. Cached prefixes are shared under one adapter alone.
        """

    def add_adapter(self, modules: Mapping[str, Any]) -> int:
        """See ``lora.adapters.AdapterCore``."""

    def remove_adapter(self, adapter: int) -> None:
        """See ``lora.adapters.AdapterCore``."""

    def cancel(self, request_id: int) -> None:
        """Ask for the end of a request; its last event says ``cancelled``."""

    def poll(self, timeout: float) -> Sequence[CoreEvent]:
        """All events since the last call; waits at most ``timeout`` seconds for the first."""

    def poll_masks(self, timeout: float) -> Sequence[Any]:
        """See ``MaskCore``."""

    def give_masks(
        self, request_id: int, num_output: int, num_drafts: int, masks: npt.NDArray[np.uint32]
    ) -> None:
        """See ``MaskCore``."""

    def refuse_mask(self, request_id: int, num_output: int, reason: str) -> None:
        """See ``MaskCore``."""

    def poll_logits(self, request_id: int) -> Any:
        """See ``ProcessorCore``."""

    def give_logits(self, request_id: int, num_output: int, logits: npt.NDArray[np.float32]) -> None:
        """See ``ProcessorCore``."""

    def refuse_logits(self, request_id: int, num_output: int, reason: str) -> None:
        """See ``ProcessorCore``."""

    def stats(self, recent_steps: int = 0) -> dict[str, Any]:
        """Counters and gauges; the records of the last steps, at most 1,024, under ``recent_steps``."""

    def shutdown(self) -> None:
        """End the engine thread and free everything."""


@dataclass(frozen=True)
class EngineInfo:
    """What the Python side must know about a loaded engine.

    Attributes:
        device: which program runs, and where; None for a core that is no engine's (tests).
        max_batch_size, max_num_tokens, max_seq_len: the limits in force, at most the engine's.
        eos_token_ids: tokens that end an output, from the checkpoint's generation config.
        kernels: how many steps of a pass each kernel computes (``kernel_paths``).
        tokenizer_dir: None for an engine without a tokenizer (token ids in, token ids out).
        generation_config: the checkpoint's own sampling defaults, by Hugging Face's names.
        architecture, parameters, dtype: of the model, for people; ``dtype`` says how weights are stored, too.
    """

    name: str
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    device: DeviceChoice | None = None
    kernels: Mapping[str, int] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    tokenizer_dir: Path | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""
    parameters: int = 0
    dtype: str = ""


@dataclass(frozen=True)
class CoreTypes:
    """The types of ``_core`` that a session needs.

    Attributes:
        make_params: makes an empty ``_core.SamplingParams``, whose fields are then set.
        queue_full: raised by ``submit`` when the core's own queue is full.
        dead: raised by ``submit`` when the engine thread has ended.
    """

    make_params: Callable[[], Any]
    queue_full: type[Exception]
    dead: type[Exception]
