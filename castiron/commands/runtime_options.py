"""The options of every command that loads an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from .common import FiniteRange

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NAMES = (
    *("device", "trust_plugins", "cuda_graphs", "num_threads", "max_batch_size", "max_num_tokens"),
    *("kv_cache_blocks", "kv_cache_memory", "kv_cache_fraction"),
    *("kv_cache_host_tier", "kv_cache_disk_tier", "kv_cache_disk_folder"),
    *("enable_prefix_caching", "scheduling_policy", "capacity_scheduler_policy"),
    *("watchdog_timeout", "speculative_decoding", "num_speculative_tokens", "draft_engine"),
    *("enable_lora", "lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras"),
)

device_option = click.option(
    "--device",
    default="auto",
    metavar="DEVICE",
    help="auto (a GPU that the engine has a program for, else the CPU), host, cuda, or cuda:INDEX.",
)
trust_plugins_option = click.option(
    "--trust-plugins", is_flag=True, help="Run machine code for the CPU that a plugin put into the engine."
)


def _named_paths(
    _context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    """Callback that refuses what is no NAME=FOLDER."""
    names = set()
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise click.BadParameter(f"{text!r}; expected NAME=FOLDER, such as sql=./sql-adapter")
        if name in names:
            raise click.BadParameter(f"the name {name!r} is given twice")
        names.add(name)
    return given


def runtime_options(function: _Function) -> _Function:
    """Add the options of a device and its limits; the command gets what was given as the dict ``runtime``."""

    @functools.wraps(function)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in _NAMES}
        given["lora_modules"] = dict(text.split("=", 1) for text in given["lora_modules"])
        runtime = {name: value for name, value in given.items() if value is not None}
        return function(*args, runtime=runtime, **kwargs)

    for add in reversed(
        (
            device_option,
            trust_plugins_option,
            click.option(
                "--cuda-graphs/--no-cuda-graphs",
                default=None,
                show_default="on",
                help="On a GPU: record decode steps at start and replay them.",
            ),
            click.option(
                "--num-threads",
                "-t",
                type=int,
                show_default="all allowed",
                help="Compute threads of the CPU.",
            ),
            click.option(
                "--max-batch-size", type=int, show_default="the engine's", help="Requests that run at once."
            ),
            click.option(
                "--max-num-tokens", type=int, show_default="the engine's", help="Tokens of one step."
            ),
            click.option("--kv-cache-blocks", type=int, help="KV cache in blocks of 32 tokens."),
            click.option("--kv-cache-memory", help="KV cache in bytes, or with a unit: 2GiB."),
            click.option(
                "--kv-cache-fraction",
                type=FiniteRange(0, 1, min_open=True),
                show_default="0.9",
                help="KV cache as a part of the GPU's memory that is left.",
            ),
            click.option(
                "--kv-cache-host-tier",
                metavar="SIZE",
                show_default="none",
                help="Memory of this machine for cached prefixes that the KV cache has no room for: 8GiB.",
            ),
            click.option(
                "--kv-cache-disk-tier",
                metavar="SIZE",
                show_default="none",
                help="Room on disk for those that the host tier has no room for; needs "
                "--kv-cache-disk-folder.",
            ),
            click.option(
                "--kv-cache-disk-folder",
                metavar="FOLDER",
                help="Where they lie, in a file without a name that is gone with the process.",
            ),
            click.option(
                "--enable-prefix-caching/--no-enable-prefix-caching",
                default=True,
                show_default="on",
                help="Use the KV cache of earlier prompts that begin alike.",
            ),
            click.option(
                "--scheduling-policy",
                type=click.Choice(["fcfs", "priority"]),
                default="fcfs",
                help="Which waiting request is served first.",
            ),
            click.option(
                "--capacity-scheduler-policy",
                type=click.Choice(["guaranteed_no_evict", "max_utilization"]),
                default="guaranteed_no_evict",
                show_default="guaranteed-no-evict",
                help="Start a request when its longest output fits, or when its prompt does and set requests "
                "back when room is short.",
            ),
            click.option(
                "--enable-lora", is_flag=True, help="Take LoRA adapters; implied by --lora-modules."
            ),
            click.option(
                "--lora-modules",
                multiple=True,
                metavar="NAME=FOLDER",
                callback=_named_paths,
                help="A LoRA adapter in PEFT's form, and its name in requests; may be given several times.",
            ),
            click.option(
                "--max-loras",
                type=click.IntRange(min=1),
                show_default="4",
                help="Different adapters in one step.",
            ),
            click.option(
                "--max-lora-rank", type=click.IntRange(1, 512), show_default="16", help="Largest rank."
            ),
            click.option(
                "--max-cpu-loras",
                type=click.IntRange(min=1),
                show_default="16, or --max-loras if that is more",
                help="Adapters in memory; the least recently used goes first.",
            ),
            click.option(
                "--watchdog-timeout",
                type=FiniteRange(0, 1e6),
                default=600.0,
                help="Seconds after which a step on the device has hung: requests fail. 0 = never.",
            ),
            click.option(
                "--speculative-decoding",
                type=click.Choice(["none", "ngram", "suffix", "draft"]),
                default="none",
                help="Guess the next tokens from the text so far (the latest n-gram, the longest suffix) "
                "or by a draft engine, and check several in one step; the output stays the same.",
            ),
            click.option(
                "--num-speculative-tokens",
                type=click.IntRange(1, 64),
                show_default="8",
                help="Guesses for one request in one step at most.",
            ),
            click.option(
                "--draft-engine",
                type=click.Path(exists=True, file_okay=False),
                help="The engine that guesses, with the same tokenizer; for --speculative-decoding draft.",
            ),
        )
    ):
        gathered = add(gathered)
    return gathered  # type: ignore[return-value]
