"""castiron's C++ runtime (cpp/bindings)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__version__: str

class QueueFullError(RuntimeError):
    """So many requests wait that the engine takes no more (``max_queue_size``)."""

class EngineDeadError(RuntimeError):
    """The engine was shut down, or died of a failure that the message tells."""

def cpu_features() -> dict[str, Any]:
    """What this machine can run: each instruction set by its name (bool), best isa (str), cpus (int)."""

def cuda_probe() -> dict[str, Any]:
    """The NVIDIA GPUs of this machine.

    Returns driver (the CUDA version that it speaks, 13000 for 13.0; 0 where there is none), error (why there
    are no devices, or ""), and devices: index, name, compute_capability (90 for 9.0), total_memory (bytes),
    multiprocessors.
    """

class SamplingParams:
    """How the tokens of one request are chosen; all fields can be set."""

    max_tokens: int
    """New tokens at most (16); 0: process the prompt only."""
    min_tokens: int
    """Stop tokens cannot be chosen before this many new tokens."""
    temperature: float
    """1.0; below 1e-5: greedy."""
    top_k: int
    """0: off."""
    top_p: float
    """1: off."""
    top_p_decay: float
    """Each token makes top_p so many times what it was, but not less than top_p_min; 1: off."""
    top_p_min: float
    """1e-6."""
    top_p_reset_ids: list[int]
    """One of these makes top_p what it was in the beginning."""
    min_p: float
    """0: off."""
    typical_p: float
    """1: off."""
    repetition_penalty: float
    """Over prompt and output, as transformers has it; 1: off."""
    presence_penalty: float
    """Over the output; 0: off."""
    frequency_penalty: float
    """Over the output, per occurrence; 0: off."""
    seed: int | None
    """uint64; None draws one. Same seed and same request give the same tokens, whatever else runs."""
    stop_token_ids: list[int]
    first_mask: Any
    """numpy uint32: bits of the tokens that may come first. Given: every later token waits for a mask."""
    allowed_token_ids: list[int]
    """Ascending; the only tokens that may be chosen. Empty: all."""
    bad_words: list[list[int]]
    """Runs of tokens that no output may contain."""
    no_repeat_ngram_size: int
    """No run of so many tokens may appear twice in prompt and output; 0: off."""
    logit_bias: dict[int, float]
    """Added to the logits of single tokens."""
    logprobs: int
    """-1: none; else how many of the likeliest tokens come with each token's own log-probability."""
    prompt_logprobs: int
    """-1: none; else the same of every prompt token but the first."""
    beam_width: int
    """0: tokens are sampled; else so many beams search for the best texts."""
    length_penalty: float
    """Of a beam search: a text's score is its sum of log-probabilities / length ** length_penalty; 1."""
    early_stopping: str
    """Of a beam search: when it ends once beam_width texts are finished: never (when no beam can do better at
    any length), likely (nor at its present length; the default), first_finished (at once)."""
    process_logits: bool
    """Each row of logits waits for give_logits before a token is chosen from it."""
    context_logits: bool
    """Logits of every prompt token are wanted."""
    generation_logits: bool
    """The raw logits that each new token was chosen from are wanted."""
    num_speculative_tokens: int
    """Guesses of the next tokens in one step at most; 0: none, -1: as many as the engine says."""

    def __init__(self) -> None: ...

class MaskWish:
    """Tokens of a request, of which somebody is to make the masks of those to come."""

    @property
    def request_id(self) -> int: ...
    @property
    def num_output(self) -> int:
        """Tokens generated so far: what the first mask is for."""
    @property
    def tokens(self) -> list[int]:
        """Since the last wish."""
    @property
    def drafts(self) -> list[int]:
        """Guesses of the next tokens: behind each of them a mask is wanted as well."""

class LogitsWish:
    """A row of logits that somebody is to change before a token is chosen from it."""

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
    @property
    def tokens(self) -> list[int]:
        """Since the last wish."""
    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """[vocab_size], to be written to."""

class TokenLogprobs:
    """Raw log-softmax at one token's place, before penalties and temperature."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> list[tuple[int, float]]:
        """(token id, log-probability), likeliest first."""

class BeamOutput:
    """One text that a beam search found."""

    @property
    def token_ids(self) -> list[int]:
        """Without the stop token that ended it."""
    @property
    def logprobs(self) -> list[float]:
        """Of each token, after penalties, rules and bias."""
    @property
    def cumulative_logprob(self) -> float:
        """Their sum, the stop token's among them."""
    @property
    def score(self) -> float:
        """cumulative_logprob / length ** length_penalty; the stop token counts."""
    @property
    def stop_token_id(self) -> int | None:
        """The stop token that ended it; None: its length did."""

class Event:
    """All that happened to one request since the last poll."""

    @property
    def request_id(self) -> int: ...
    @property
    def token_ids(self) -> list[int]:
        """New tokens; the stop token is not among them."""
    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One per token of token_ids, if asked for."""
    @property
    def finished(self) -> bool:
        """No event comes after this one."""
    @property
    def finish_reason(self) -> str:
        """ "" while it runs; stop, length, cancelled or error."""
    @property
    def stop_token_id(self) -> int | None:
        """The stop token that ended the request."""
    @property
    def beams(self) -> list[BeamOutput]:
        """What a beam search found, best first, in the last event."""
    @property
    def error(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from the cache instead of computed."""
    @property
    def queue_seconds(self) -> float:
        """What the request waited for its first step."""
    @property
    def first_token_seconds(self) -> float:
        """From its arrival to its first token, in the last event; 0: it had none."""
    @property
    def seconds(self) -> float:
        """From its arrival to its end, in the last event."""
    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Of prompt tokens 1, 2, ..., in one event, when the prompt is processed; if asked for."""
    @property
    def context_logits(self) -> npt.NDArray[np.float32] | None:
        """[prompt_tokens, vocab_size], in one event, when the prompt is processed; if asked for."""
    @property
    def generation_logits(self) -> npt.NDArray[np.float32] | None:
        """[output tokens, vocab_size], in the last event; if asked for."""

class Engine:
    """A program on the device of its target, and the thread that serves requests with it."""

    def __init__(
        self,
        program: Mapping[str, Any],
        weights_path: str,
        tensors: Mapping[str, tuple[int, int]],
        options: Mapping[str, Any],
        draft: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the program, copy the weights, reserve all memory, start the thread.

        Args:
            program: ``Program.model_dump()``.
            weights_path: the safetensors file.
            tensors: for each weight (byte offset in the file, bytes).
            draft: the model that guesses tokens: program (for host), weights_path, tensors.
            options: num_threads, kv_cache_blocks, max_batch_size, max_num_tokens, max_queue_size, vocab_limit
                (ids from it on are never sampled), host_tier_bytes (for evicted blocks; 0: none),
                kernel_images ({entry of rank0.engine: bytes}); on host
                huge_pages (bool), isa (str), max_lora_rank (0: no adapters); on CUDA device_index (0),
                cuda_graphs (True), kv_cache_fraction (0.9 of the memory that is free after all else is
                reserved), max_lora_rank (0: the program's); max_loras (different adapters running at a
                time, on CUDA slots for them; 0: none). None or absent: chosen.

        Raises:
            ValueError: anything that is not right, with what was found and what was expected.
            MemoryError: the weights, the arena or the KV cache do not fit. RuntimeError: the same on CUDA; no
                driver, no device.
        """

    def submit(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: bytes = b"",
        adapter: int = 0,
    ) -> int:
        """Queue a request and return its id; ``prompt`` is one-dimensional and contiguous, ``cache_salt`` 16
        bytes or none, ``adapter`` of ``add_adapter`` or 0.

        Raises:
            ValueError: a request that cannot be served. QueueFullError. EngineDeadError.
        """

    def add_adapter(
        self, modules: Mapping[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], float]]
    ) -> int:
        """Make a LoRA adapter ready to run and return its id; on any thread.

        Args:
            modules: by path in the source model (a [rank, inputs], b [outputs, rank], scale).

        Raises:
            ValueError: it does not fit, or the engine was started without max_loras and max_lora_rank.
        """

    def remove_adapter(self, adapter: int) -> None:
        """No request can name it any more; its memory goes with the last that did. Unknown: ignored."""

    def cancel(self, request_id: int) -> None:
        """End a request within a step; its last event says ``cancelled``. Unknown ids are ignored."""

    def poll(self, timeout: float) -> list[Event]:
        """News of all requests, waiting up to ``timeout`` seconds for some. For one thread at a time."""

    def poll_masks(self, timeout: float) -> list[MaskWish]:
        """Requests with new tokens whose grammars have not told what may come next."""

    def give_masks(
        self, request_id: int, num_output: int, num_drafts: int, masks: npt.NDArray[np.uint32]
    ) -> None:
        """Masks [n, words]: for the token after ``num_output`` tokens, and for that behind each of the wish's
        drafts, or of the first of them. Ignored when the request has ended."""

    def refuse_mask(self, request_id: int, num_output: int, reason: str) -> None:
        """There is none: the request ends with an error."""

    def poll_logits(self, request_id: int) -> LogitsWish | None:
        """Wait for the next row of logits of a request with ``process_logits``; None when it has ended."""

    def give_logits(self, request_id: int, num_output: int, logits: npt.NDArray[np.float32]) -> None:
        """The row to choose from after ``num_output`` tokens. Ignored when the request has ended."""

    def refuse_logits(self, request_id: int, num_output: int, reason: str) -> None:
        """There is none: the request ends with an error."""

    def stats(self, recent_steps: int = 0) -> dict[str, Any]:
        """Counters and gauges (docs/batching.md), and the records of the last steps if any are wanted."""

    def shutdown(self) -> None:
        """Cancel what runs and join the engine thread; what is left can still be polled."""
