"""``castiron serve-engine``: an OpenAI-compatible HTTP server over one engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from .common import engine_argument, human_bytes
from .runtime_options import runtime_options

if TYPE_CHECKING:
    from castiron.runtime.session import Session


@click.command(short_help="Serve an engine over an OpenAI-compatible HTTP API.")
@engine_argument
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port; 0 = any free one.")
@click.option(
    "--served-model-name", multiple=True, show_default="the engine's", help="Model names to answer to."
)
@click.option(
    "--max-queue-size", type=click.IntRange(min=0), default=256, help="Waiting requests; more get status 429."
)
@click.option(
    "--max-queued-tokens", type=click.IntRange(min=1), help="Waiting prompts' tokens; more get status 429."
)
@click.option(
    "--generation-config",
    type=click.Choice(["auto", "none"]),
    default="auto",
    help="Sampling defaults: the checkpoint's, or the API's alone.",
)
@click.option("--worker-threads", type=click.IntRange(min=1), default=2, help="Threads for tokenization.")
@click.option(
    "--max-body-bytes", type=click.IntRange(min=1024), default=16 << 20, help="Larger bodies get 413."
)
@click.option(
    "--shutdown-timeout", type=click.IntRange(min=0), default=30, help="Seconds to finish after SIGTERM."
)
@click.option(
    "--allow-runtime-lora-updating",
    is_flag=True,
    help="Let clients load and unload adapters, from any folder that the server can read.",
)
@click.option(
    "--tool-call-parser",
    default="auto",
    help="How the model writes tool calls: openai, deepseek_v3, mistral, pythonic, llama3_json, hermes, "
    "none; auto: as its chat template says.",
)
@click.option(
    "--reasoning-parser",
    default="auto",
    help="How the model writes its reasoning: openai, mistral, think, none; auto: as its chat template says.",
)
@click.option(
    "--enable-tokenizer-info-endpoint",
    is_flag=True,
    help="Answer GET /tokenizer_info with the tokenizer's configuration, chat template included.",
)
@click.option("--disable-page", is_flag=True, help="Serve the API alone, no playground and live view at /.")
@click.option("--access-log/--no-access-log", default=False, help="Log a line for each request.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    help="For the log.",
)
@runtime_options
def command(
    engine: str,
    host: str,
    port: int,
    served_model_name: tuple[str, ...],
    max_queue_size: int,
    max_queued_tokens: int | None,
    generation_config: str,
    worker_threads: int,
    max_body_bytes: int,
    shutdown_timeout: int,
    allow_runtime_lora_updating: bool,
    tool_call_parser: str,
    reasoning_parser: str,
    enable_tokenizer_info_endpoint: bool,
    disable_page: bool,
    access_log: bool,
    log_level: str,
    runtime: dict[str, Any],
) -> None:
    """Serve ENGINE: /v1/models, /v1/completions, /v1/chat/completions, /health, /metrics.

    SIGTERM finishes the running requests and ends with exit code 0; a second signal ends at once.
    """
    from castiron.runtime.async_engine import AsyncEngine
    from castiron.runtime.loading import open_session
    from castiron.runtime.options import RuntimeOptions
    from castiron.runtime.server.serve import serve
    from castiron.runtime.server.service import ServerConfig, Service

    began = time.perf_counter()
    options = RuntimeOptions(max_queue_size=max_queue_size, max_queued_tokens=max_queued_tokens, **runtime)
    session = open_session(engine, options=options)
    try:
        tokenizer = session.tokenizer
        seconds = time.perf_counter() - began
        names = served_model_name or (session.info.name,)
        config = ServerConfig(
            model_names=names,
            use_generation_config=generation_config == "auto",
            worker_threads=worker_threads,
            max_body_bytes=max_body_bytes,
            lora_updating=allow_runtime_lora_updating,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            tokenizer_info=enable_tokenizer_info_endpoint,
            page=not disable_page,
        )
        service = Service(AsyncEngine(session), config)
        _describe(session, seconds)
        if tokenizer is None:
            click.echo("no tokenizer: /v1/completions takes token ids only")
        elif "default" not in tokenizer.chat_templates:
            click.echo("no chat template: /v1/chat/completions is refused; /v1/completions works")
        serve(
            service,
            host,
            port,
            shutdown_timeout=shutdown_timeout,
            access_log=access_log,
            log_level=log_level,
            ready=lambda actual: click.echo(f"serving {names[0]} on http://{_shown(host)}:{actual}/v1"),
        )
    finally:
        session.close()


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _describe(session: Session, seconds: float) -> None:
    """What people look for when a server starts: limits, room in the KV cache, where the time went."""
    from castiron import __version__

    info, stats = session.info, session.core.stats()
    click.echo(f"castiron {__version__}: {info.name}")
    if info.device is not None:
        click.echo(f"device: {info.device}")
    click.echo(
        f"limits: {info.max_batch_size} running requests, {info.max_num_tokens} tokens a step, "
        f"{info.max_seq_len} tokens a request"
    )
    if blocks := stats.get("kv_blocks_total"):
        tokens = blocks * 32
        size = f", {human_bytes(stats['kv_bytes'])}" if "kv_bytes" in stats else ""
        click.echo(
            f"KV cache: {tokens} tokens{size}; maximum concurrency for {info.max_seq_len} tokens: "
            f"{min(tokens / info.max_seq_len, info.max_batch_size):.1f}x"
        )
    click.echo(f"loaded in {seconds:.2f} s")
