"""``castiron serve-engine``: an OpenAI-compatible HTTP server over one engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from castiron.errors import EngineError

from .common import engine_argument
from .config_file import ConfigurableCommand, given_options
from .replicas import replica_options, serve_several
from .runtime_options import runtime_options
from .server_options import front_of, listen_of, server_options
from .server_report import show_ready, show_routes, show_session


@click.command(cls=ConfigurableCommand, short_help="Serve an engine over an OpenAI-compatible HTTP API.")
@engine_argument
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
    "--allow-runtime-lora-updating",
    is_flag=True,
    help="Let clients load and unload adapters, from any folder that the server can read.",
)
@click.option(
    "--tool-call-parser",
    default="auto",
    help="How the model writes tool calls: openai, deepseek_v3, mistral, pythonic, llama3_json, kimi_k2, "
    "qwen3_coder, glm45, hermes, none; auto: as its chat template says.",
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
@click.option(
    "--allow-engine-swap",
    is_flag=True,
    help="Let clients have another engine served, from any folder that the server can read.",
)
@replica_options
@server_options
@runtime_options
def command(
    engine: str,
    served_model_name: tuple[str, ...],
    max_queue_size: int,
    max_queued_tokens: int | None,
    generation_config: str,
    worker_threads: int,
    max_body_bytes: int,
    allow_runtime_lora_updating: bool,
    tool_call_parser: str,
    reasoning_parser: str,
    enable_tokenizer_info_endpoint: bool,
    disable_page: bool,
    allow_engine_swap: bool,
    replicas: int,
    ray_address: str | None,
    http: dict[str, Any],
    runtime: dict[str, Any],
) -> None:
    """Serve ENGINE: OpenAI's completions, chat and responses, Anthropic's messages, /health, /metrics.

    SIGTERM finishes the running requests and ends with exit code 0; a second signal ends at once.
    """
    from castiron.runtime.phases import Phases

    phases = Phases()
    with phases("imports"):
        from castiron.runtime.async_engine import AsyncEngine
        from castiron.runtime.loading import open_session
        from castiron.runtime.options import RuntimeOptions
        from castiron.runtime.server.app import make_app
        from castiron.runtime.server.listening import check_address
        from castiron.runtime.server.logs import configure_logging
        from castiron.runtime.server.serve import serve
        from castiron.runtime.server.service import ServerConfig, Service

    # What is wrong with these is said before a large engine is loaded.
    listen, front = listen_of(http), front_of(http)
    if ray_address is not None and replicas == 1:
        raise EngineError("--ray-address is for --replicas 2 or more")
    for name in served_model_name:
        if not name or not name.isprintable():
            raise EngineError(f"--served-model-name is {name[:200]!r}; expected printable characters")
    configure_logging(http["log_level"], http["log_format"])
    runtime |= {"max_queue_size": max_queue_size, "max_queued_tokens": max_queued_tokens}
    options = RuntimeOptions(**runtime)
    if allow_runtime_lora_updating and not options.wants_lora:
        raise EngineError(
            "--allow-runtime-lora-updating needs an engine that takes adapters; add --enable-lora"
        )
    config = partial(
        ServerConfig,
        use_generation_config=generation_config == "auto",
        worker_threads=worker_threads,
        max_body_bytes=max_body_bytes,
        lora_updating=allow_runtime_lora_updating,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        tokenizer_info=enable_tokenizer_info_endpoint,
        page=not disable_page,
        log_prompts=http["log_prompts"],
    )
    check_address(listen)
    if replicas > 1:
        names = served_model_name
        swap = allow_engine_swap
        serve_several(engine, replicas, runtime, config, names, listen, front, swap, ray_address)
        return
    session = open_session(engine, options=options, phases=phases)
    close = session.close
    try:
        with phases("tokenizer"):  # what is left of it: it is loaded beside the weights
            _ = session.tokenizer
        names = served_model_name or (session.info.name,)
        load = partial(open_session, options=options) if allow_engine_swap else None
        service = Service(AsyncEngine(session), config(names), load)
        close = service.slot.close_now
        show_session(session, phases.seconds, given_options(click.get_current_context()))
        app = make_app(service, front)
        show_routes(app.routes)
        serve(
            service,
            app,
            listen,
            ready=lambda port: show_ready(names[0], listen, front.prefix, port),
        )
    finally:
        close()
