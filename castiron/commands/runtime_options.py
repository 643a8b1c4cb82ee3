"""The options of every command that loads an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NAMES = ("num_threads", "max_batch_size", "max_num_tokens", "kv_cache_blocks", "kv_cache_memory")


def runtime_options(function: _Function) -> _Function:
    """Add --num-threads and the limits; the command gets those that were given as the dict ``runtime``."""

    @functools.wraps(function)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in _NAMES}
        runtime = {name: value for name, value in given.items() if value is not None}
        return function(*args, runtime=runtime, **kwargs)

    for add in reversed(
        (
            click.option("--num-threads", "-t", type=int, help="Compute threads. [default: all allowed]"),
            click.option("--max-batch-size", type=int, help="Requests that run at once. [default: engine's]"),
            click.option("--max-num-tokens", type=int, help="Tokens of one step. [default: engine's]"),
            click.option("--kv-cache-blocks", type=int, help="KV cache in blocks of 32 tokens."),
            click.option("--kv-cache-memory", help="KV cache in bytes, or with a unit: 2GiB."),
        )
    ):
        gathered = add(gathered)
    return gathered  # type: ignore[return-value]
