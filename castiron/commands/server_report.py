"""What ``serve-engine`` prints before it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from .common import human_bytes, human_count, printable

if TYPE_CHECKING:
    from castiron.runtime.server.listening import Listen
    from castiron.runtime.session import Session


def show_session(session: Session, phases: Mapping[str, float], options: Sequence[str]) -> None:
    """What people look for when a server starts: limits, room in the KV cache, where the time went."""
    from castiron import __version__
    from castiron.engines.program import BLOCK_TOKENS

    info, stats = session.info, session.core.stats()
    count = f"{human_count(info.parameters)} parameters" if info.parameters else ""
    model = ", ".join(part for part in (info.architecture, count, info.dtype) if part)
    click.echo(printable(f"castiron {__version__}: {info.name}{f' ({model})' if model else ''}"))
    if info.device is not None:
        click.echo(f"device: {info.device}{_processor(stats)}")
    queue = "any number of" if session.capacity is None else str(session.capacity - info.max_batch_size)
    click.echo(
        f"limits: {info.max_batch_size} running requests, {queue} waiting, {info.max_num_tokens} tokens a "
        f"step, {info.max_seq_len} tokens a request"
    )
    if blocks := stats.get("kv_blocks_total"):
        tokens = blocks * BLOCK_TOKENS
        size = f", {human_bytes(stats['kv_bytes'])}" if "kv_bytes" in stats else ""
        click.echo(
            f"KV cache: {tokens} tokens{size}; maximum concurrency for {info.max_seq_len} tokens: "
            f"{min(tokens / info.max_seq_len, info.max_batch_size):.1f}x"
        )
    if windows := stats.get("kv_window_blocks_total"):
        click.echo(
            f"of them {windows * BLOCK_TOKENS} tokens in layers with a window of {stats['kv_window']} tokens"
        )
    if "weights_bytes" in stats:
        click.echo(
            f"memory: {human_bytes(stats['weights_bytes'])} of weights, "
            f"{human_bytes(stats.get('arena_bytes', 0))} of activations"
        )
    tokenizer = session.tokenizer
    if tokenizer is None:
        click.echo("no tokenizer: /v1/completions takes token ids only")
    elif "default" not in tokenizer.chat_templates:
        click.echo("no chat template: /v1/chat/completions is refused; /v1/completions works")
    if options:
        click.echo(f"options: {printable(', '.join(options))}")
    total = sum(phases.values())
    click.echo(
        f"loaded in {total:.2f} s: " + ", ".join(f"{name} {took:.2f} s" for name, took in phases.items())
    )


def show_routes(routes: Sequence[str]) -> None:
    """Where requests may go."""
    click.echo(f"routes: {', '.join(routes)}")


def show_ready(name: str, listen: Listen, prefix: str, port: int) -> None:
    """Where the server answers now."""
    paths = f"{prefix}/v1" if listen.uds is None else f" (paths begin with {prefix}/v1)"
    click.echo(f"serving {name} on {listen.url(port)}{paths}")


def _processor(stats: Mapping[str, Any]) -> str:
    if not stats.get("isa"):
        return ""
    return f", {stats['isa']}, {stats.get('num_threads', 1)} threads"
