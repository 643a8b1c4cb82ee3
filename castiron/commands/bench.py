"""``castiron bench``: an engine's latency and throughput on this machine, and a server's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from castiron.errors import RequestError

from .bench_serve import serve
from .common import console, engine_argument, json_option, print_json, progress_bar, table
from .runtime_options import runtime_options

if TYPE_CHECKING:
    from castiron.runtime.session import Session

_positive = click.IntRange(min=1)


@click.group(short_help="Measure an engine's latency or throughput, or a server.")
def command() -> None:
    """Measure an engine on this machine: random prompts, greedy, EOS ignored, medians after a warm-up; or a
    server, by what its clients see.
    """


command.add_command(serve)


@command.command(short_help="Time to first token, prefill and decode speed.")
@engine_argument
@click.option("--input-len", type=_positive, default=512, help="Tokens of each prompt.")
@click.option("--output-len", type=_positive, default=128, help="New tokens of each request.")
@click.option("--batch-size", type=_positive, default=1, help="Requests that start together.")
@click.option("--num-iters", type=_positive, default=5, help="Measured rounds.")
@click.option("--num-iters-warmup", type=click.IntRange(min=0), default=1, help="Rounds before them.")
@click.option("--seed", type=int, default=0, help="Seed of the random prompts.")
@json_option
@runtime_options
def latency(
    engine: str, as_json: bool, runtime: dict[str, Any], num_iters: int, num_iters_warmup: int, **sizes: Any
) -> None:
    """Time to first token, prefill and decode speed of one batch at a time."""
    from castiron.runtime.bench import measure_latency

    with _session(engine, runtime, sizes["batch_size"]) as session:
        _check_fits(session, sizes["input_len"], sizes["output_len"])
        with progress_bar("latency", num_iters + num_iters_warmup, quiet=as_json) as advance:
            result = measure_latency(
                session, num_iters=num_iters, num_warmup=num_iters_warmup, progress=advance, **sizes
            )
        stats = session.core.stats()
        name = session.info.name
    if as_json:
        print_json({"model": name, **asdict(result), **_machine(stats)})
        return
    shown = table(
        f"Latency of {name}: batch {result.batch_size}, {result.input_len} tokens in, {result.output_len} "
        "out",
        "measure",
        "median",
        right=("median",),
    )
    shown.add_row("time to first token", f"{result.ttft_ms:.1f} ms")
    shown.add_row("prefill", f"{result.prefill_tokens_per_s:.0f} tokens/s")
    if result.decode_tokens_per_s is not None and result.tpot_ms is not None:
        shown.add_row("decode", f"{result.decode_tokens_per_s:.1f} tokens/s")
        shown.add_row("time per output token", f"{result.tpot_ms:.2f} ms")
    shown.add_row("whole request", f"{result.latency_ms:.1f} ms")
    console().print(shown)


@command.command()
@engine_argument
@click.option("--input-len", type=_positive, default=128, help="Tokens of each prompt.")
@click.option("--output-len", type=_positive, default=128, help="New tokens of each request.")
@click.option("--num-prompts", type=_positive, default=32, help="Requests of a round.")
@click.option("--max-concurrency", type=_positive, show_default="all", help="Requests in the engine at once.")
@click.option("--num-iters", type=_positive, default=3, help="Measured rounds.")
@click.option("--num-iters-warmup", type=click.IntRange(min=0), default=1, help="Rounds before them.")
@click.option("--seed", type=int, default=0, help="Seed of the random prompts.")
@json_option
@runtime_options
def throughput(
    engine: str, as_json: bool, runtime: dict[str, Any], num_iters: int, num_iters_warmup: int, **sizes: Any
) -> None:
    """Tokens per second over many requests, prefill included."""
    from castiron.runtime.bench import measure_throughput

    with _session(engine, runtime, None) as session:
        _check_fits(session, sizes["input_len"], sizes["output_len"])
        with progress_bar("throughput", num_iters + num_iters_warmup, quiet=as_json) as advance:
            result = measure_throughput(
                session, num_iters=num_iters, num_warmup=num_iters_warmup, progress=advance, **sizes
            )
        stats = session.core.stats()
        name = session.info.name
    if as_json:
        print_json({"model": name, **asdict(result), **_machine(stats)})
        return
    title = (
        f"Throughput of {name}: {result.num_prompts} requests, {result.max_concurrency} at once, "
        f"{result.input_len} tokens in, {result.output_len} out"
    )
    shown = table(title, "measure", "value", right=("value",))
    shown.add_row("output", f"{result.output_tokens_per_s:.1f} tokens/s")
    shown.add_row("input and output", f"{result.total_tokens_per_s:.1f} tokens/s")
    shown.add_row("requests", f"{result.request_throughput:.2f} /s")
    shown.add_row("duration", f"{result.duration_s:.2f} s")
    console().print(shown)
    spread = table(
        "Milliseconds", "measure", "mean", "p50", "p90", "p99", right=("mean", "p50", "p90", "p99")
    )
    for label, values in (
        ("time to first token", result.ttft_ms),
        ("time per output token", result.tpot_ms),
        ("whole request", result.latency_ms),
    ):
        if values:
            spread.add_row(label, *(f"{values[key]:.2f}" for key in ("mean", "p50", "p90", "p99")))
    console().print(spread)


@contextmanager
def _session(engine: str, runtime: dict[str, Any], batch_size: int | None) -> Iterator[Session]:
    from castiron.runtime.loading import open_session
    from castiron.runtime.options import RuntimeOptions

    session = open_session(engine, options=RuntimeOptions(**runtime))
    try:
        if batch_size is not None and batch_size > session.info.max_batch_size:
            raise RequestError(
                f"--batch-size is {batch_size}, and the engine runs at most {session.info.max_batch_size} "
                "requests "
                "at once; choose less, or build it with a larger --max-batch-size"
            )
        yield session
    finally:
        session.close()


def _check_fits(session: Session, input_len: int, output_len: int) -> None:
    if input_len + output_len > session.info.max_seq_len:
        raise RequestError(
            f"--input-len {input_len} and --output-len {output_len} make {input_len + output_len} tokens, "
            "and the "
            f"engine's max_seq_len is {session.info.max_seq_len}; choose less, or build it with a larger "
            "--max-seq-len"
        )


def _machine(stats: dict[str, Any]) -> dict[str, Any]:
    return {key: stats[key] for key in ("isa", "threads", "num_threads") if key in stats}
