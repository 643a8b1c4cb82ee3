"""RuntimeOptions: what a runtime may choose within an engine's limits, checked before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from castiron.errors import EngineError

from .sampling_params import MAX_SPECULATIVE_TOKENS

if TYPE_CHECKING:
    from ..engines import Engine

#: Of adapters: the largest for which memory is reserved.
MAX_LORA_RANK = 512
_DEFAULT_LORAS, _DEFAULT_LORA_RANK, _DEFAULT_CPU_LORAS = 4, 16, 16
SCHEDULING_POLICIES = ("fcfs", "priority")
CAPACITY_POLICIES = ("guaranteed_no_evict", "max_utilization")
SPECULATION = ("none", "ngram", "suffix", "draft")
_INTEGERS = (
    *("num_threads", "max_batch_size", "max_num_tokens", "kv_cache_blocks"),
    *("max_queue_size", "max_queued_tokens", "num_speculative_tokens"),
    *("max_loras", "max_lora_rank", "max_cpu_loras"),
)


class LoraLimits(NamedTuple):
    """Adapters that run in one step, their largest rank, and how many are in memory."""

    in_step: int
    rank: int
    in_memory: int


@dataclass(frozen=True)
class RuntimeOptions:
    """What a runtime may choose within an engine's limits; None leaves the choice to the engine.

    Attributes:
        device: "auto" (a GPU that the engine has a program for, else the CPU), "host", "cuda" or "cuda:1".
        trust_plugins: run machine code for the CPU that a plugin put into the engine.
        cuda_graphs: record decode steps once and replay them; None = yes, on a GPU.
        num_threads: compute threads of the CPU; default: the CPUs this process may use.
        max_batch_size: requests that run at once.
        max_num_tokens: tokens of one step, prefill chunks and decodes together.
        kv_cache_blocks: size of the KV cache in blocks of 32 tokens; default: enough for a full batch of
            full length.
        kv_cache_memory: the same in bytes, or as text such as ``"2GiB"``.
        kv_cache_fraction: part of the GPU's memory left after weights and activations that the KV cache
            takes where its size is not given otherwise; default 0.9.
        kv_cache_host_tier: memory of this machine, in bytes or as text such as ``"8GiB"``, for blocks that
            the prefix cache has no more room for; they are copied back when a prompt wants them. None = no
            such memory: they are gone, and computed again.
        kv_cache_disk_tier, kv_cache_disk_folder: so much room on the disk of that folder for blocks that the
            host tier has no more room for. The file has no name and is gone with the process.
        max_queue_size: requests that may wait; more are refused. None = no bound.
        max_queued_tokens: tokens of the prompts that may wait; None = no bound. One prompt may always wait.
        enable_prefix_caching: keep the keys and values of finished prompts as long as there is room, and use
            them for prompts that begin alike.
        scheduling_policy: "fcfs" (as they come) or "priority" (by the requests' ``priority``).
        capacity_scheduler_policy: "guaranteed_no_evict" (a request starts when the KV cache has room for
            its longest possible output, and runs to its end) or "max_utilization" (it starts when there is
            room for its prompt; when room is short, requests are set back and computed again).
        enable_lora: requests may name LoRA adapters; implied by ``lora_modules``.
        lora_modules: adapters to load at the start: folders in PEFT's form by the names that requests use.
        max_loras: different adapters that run in one step; requests for more of them wait. Default: 4.
        max_lora_rank: the largest rank of an adapter; memory for its sums is reserved at start. Default: 16
            on the CPU, on a GPU what the engine was built for.
        max_cpu_loras: adapters in memory, the least recently used goes first; default: 16, or max_loras if
            that is more.
        watchdog_timeout: a step that is longer on the device, in seconds, has hung: all requests end with an
            error and the engine is dead. 0 = no such limit.
        speculative_decoding: who guesses the next tokens of each output, so that one step checks several of
            them; the output is the same with and without. "none"; "ngram" (prompt lookup: what followed the
            last two to four tokens at their latest occurrence) or "suffix" (what followed the longest end
            of the text that was there before), both in the request's own prompt and output; "draft" (the
            model of ``draft_engine``).
        draft_engine: folder of a smaller engine with the same tokenizer, for "draft"; it runs on the CPU.
        num_speculative_tokens: guesses for one request in one step at most; default 8. How many are made
            depends on how often they are right.
    """

    device: str = "auto"
    trust_plugins: bool = False
    cuda_graphs: bool | None = None
    num_threads: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    kv_cache_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    kv_cache_fraction: float | None = None
    kv_cache_host_tier: int | str | None = None
    kv_cache_disk_tier: int | str | None = None
    kv_cache_disk_folder: str | None = None
    max_queue_size: int | None = None
    max_queued_tokens: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: str = SCHEDULING_POLICIES[0]
    capacity_scheduler_policy: str = CAPACITY_POLICIES[0]
    enable_lora: bool = False
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None
    watchdog_timeout: float = 600.0
    speculative_decoding: str = SPECULATION[0]
    num_speculative_tokens: int | None = None
    draft_engine: str | os.PathLike[str] | None = None

    @property
    def wants_lora(self) -> bool:
        """Whether the engine is to take adapters."""
        return self.enable_lora or bool(self.lora_modules)

    @property
    def lora_limits(self) -> LoraLimits:
        """The limits of adapters in force."""
        in_step = self.max_loras or _DEFAULT_LORAS
        in_memory = self.max_cpu_loras or max(_DEFAULT_CPU_LORAS, in_step)
        return LoraLimits(in_step, self.max_lora_rank or _DEFAULT_LORA_RANK, in_memory)

    def check(self, engine: Engine) -> None:
        """Raise EngineError for values that make no sense or go over the engine's limits."""
        for name in _INTEGERS:
            value = getattr(self, name)
            least = 0 if name == "max_queue_size" else 1
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise EngineError(f"{name} is {value!r}; expected an integer of at least {least}")
        for name in ("trust_plugins", "enable_prefix_caching", "enable_lora"):
            if not isinstance(getattr(self, name), bool):  # "no" would mean yes
                raise EngineError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if self.cuda_graphs not in (None, True, False):
            raise EngineError(f"cuda_graphs is {self.cuda_graphs!r}; expected True, False or None")
        if not isinstance(self.lora_modules, Mapping):
            raise EngineError(f"lora_modules is {self.lora_modules!r}; expected folders by names of adapters")
        for name, known in (
            ("scheduling_policy", SCHEDULING_POLICIES),
            ("capacity_scheduler_policy", CAPACITY_POLICIES),
            ("speculative_decoding", SPECULATION),
        ):
            if getattr(self, name) not in known:
                raise EngineError(f"{name} is {getattr(self, name)!r}; expected {' or '.join(known)}")
        if self.num_speculative_tokens is not None and self.speculative_decoding == "none":
            raise EngineError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, and speculative_decoding is none; "
                "leave it out, or choose ngram, suffix or draft"
            )
        if self.draft_engine is not None and not isinstance(self.draft_engine, str | os.PathLike):
            raise EngineError(f"draft_engine is {self.draft_engine!r}; expected the folder of an engine")
        if (self.speculative_decoding == "draft") != (self.draft_engine is not None):
            raise EngineError(
                f"speculative_decoding is {self.speculative_decoding} and draft_engine is "
                f"{self.draft_engine}; expected both draft and an engine's folder, or neither"
            )
        if (self.num_speculative_tokens or 0) > MAX_SPECULATIVE_TOKENS:
            raise EngineError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; expected at most "
                f"{MAX_SPECULATIVE_TOKENS}"
            )
        timeout = self.watchdog_timeout
        if not (_is_number(timeout) and 0 <= timeout <= 1e6):
            raise EngineError(f"watchdog_timeout is {timeout!r}; expected 0 (off) to 1000000 seconds")
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            if getattr(self, name) is not None and not self.wants_lora:
                raise EngineError(
                    f"{name} is {getattr(self, name)}, and the engine is to take no LoRA adapters; leave it "
                    "out, or set enable_lora (--enable-lora) or lora_modules"
                )
        loras = self.lora_limits
        if loras.in_memory < loras.in_step:
            raise EngineError(
                f"max_cpu_loras is {loras.in_memory}, and max_loras {loras.in_step}: adapters that run "
                "are in memory, so it must be at least as much"
            )
        if loras.rank > MAX_LORA_RANK:
            raise EngineError(f"max_lora_rank is {self.max_lora_rank}; expected at most {MAX_LORA_RANK}")
        limits = engine.manifest.limits
        for name in ("max_batch_size", "max_num_tokens"):
            value, limit = getattr(self, name), getattr(limits, name)
            if value is not None and value > limit:
                raise EngineError(
                    f"{name} is {value}, and the engine was built for {limit}; choose less, or rebuild it: "
                    f"{engine.rebuild_command} --{name.replace('_', '-')} {value}"
                )
        if self.kv_cache_blocks is not None and self.kv_cache_memory is not None:
            raise EngineError(
                "kv_cache_blocks and kv_cache_memory both set the size of the KV cache; give one of them"
            )
        if self.kv_cache_host_tier is not None and not self.enable_prefix_caching:
            raise EngineError(
                f"kv_cache_host_tier is {self.kv_cache_host_tier!r} and enable_prefix_caching is off; it "
                "keeps what the prefix cache gives up: leave one of them out"
            )
        if (self.kv_cache_disk_tier is None) != (self.kv_cache_disk_folder is None):
            raise EngineError(
                f"kv_cache_disk_tier is {self.kv_cache_disk_tier!r} and kv_cache_disk_folder "
                f"{self.kv_cache_disk_folder!r}; they say how much goes to disk, and where: give both or none"
            )
        if self.kv_cache_disk_tier is not None and self.kv_cache_host_tier is None:
            raise EngineError("kv_cache_disk_tier keeps what kv_cache_host_tier gives up; give that as well")
        for name in ("kv_cache_blocks", "kv_cache_memory"):
            if self.kv_cache_fraction is not None and getattr(self, name) is not None:
                raise EngineError(
                    f"kv_cache_fraction and {name} both set the size of the KV cache; give one of them"
                )
        part = self.kv_cache_fraction
        if part is not None and not (_is_number(part) and 0 < part <= 1):
            raise EngineError(f"kv_cache_fraction is {part!r}; expected more than 0, at most 1")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
