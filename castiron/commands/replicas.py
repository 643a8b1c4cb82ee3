"""``castiron serve-engine --replicas N``: several engines behind one address, by Ray Serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .common import printable
from .server_report import show_ready

if TYPE_CHECKING:
    from castiron.runtime.server.front import FrontConfig
    from castiron.runtime.server.listening import Listen
    from castiron.runtime.server.service import ServerConfig

_Function = TypeVar("_Function", bound=Callable[..., Any])


def replica_options(function: _Function) -> _Function:
    """Add the options."""
    for add in (
        click.option(
            "--ray-address",
            show_default="Ray on this machine",
            help="Cluster for --replicas: HOST:PORT, or auto.",
        ),
        click.option(
            "--replicas",
            type=click.IntRange(min=1),
            default=1,
            help="Engines, each an actor of Ray Serve; prompts go where their beginning is cached.",
        ),
    ):
        function = add(function)
    return function


def serve_several(
    engine: str,
    replicas: int,
    runtime: dict[str, Any],
    config: Callable[[tuple[str, ...]], ServerConfig],
    names: tuple[str, ...],
    listen: Listen,
    front: FrontConfig,
    swap: bool,
    ray_address: str | None,
) -> None:
    """Start the replicas and serve until a signal, as one engine is served.

    Args:
        config: makes it of the model names.
        swap: another engine may take its place.
        names: those of the options; without any the engine's.
    """
    import time

    from castiron import __version__
    from castiron.engines import open_engine
    from castiron.runtime.scale_out.cluster import started, threads_of_each
    from castiron.runtime.scale_out.replicas import Replicas
    from castiron.runtime.server.error_forms import error_response
    from castiron.runtime.server.front import Front
    from castiron.runtime.server.serve import serve

    names = names or (open_engine(engine, every_program=False).name,)
    name = names[0]
    runtime = {"num_threads": threads_of_each(replicas), **runtime}
    click.echo(printable(f"castiron {__version__}: {name}, {replicas} replicas"))
    began = time.perf_counter()
    engine = str(Path(engine).resolve())
    traces = None if front.tracer is None else front.tracer.endpoint
    with started(engine, replicas, runtime, config(names), swap, traces, ray_address) as handles:
        click.echo(
            f"replicas loaded in {time.perf_counter() - began:.2f} s, {runtime['num_threads']} threads each"
        )
        all_of_them = Replicas(handles, engine, config(names).max_body_bytes)
        app = Front(all_of_them.app(), front, error_response)
        serve(
            all_of_them,
            app,
            listen,
            ready=lambda port: show_ready(name, listen, front.prefix, port),
        )
