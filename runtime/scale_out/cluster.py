"""Replicas on a Ray cluster, or on a Ray of this machine's own."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from castiron.errors import EngineError

from ..server.service import ServerConfig
from .replica import Replica

#: Ray Serve would queue what is above; engines have queues of their own, which answer 429.
_NO_LIMIT = 1_000_000
_END_SECONDS = 5.0


@contextmanager
def started(
    engine: str,
    replicas: int,
    runtime: dict[str, Any],
    config: ServerConfig,
    swap: bool,
    traces: str | None,
    address: str | None,
) -> Iterator[list[Any]]:
    """Have ``replicas`` actors load the engine; yields their handles, and ends the actors at the end.

    Args:
        engine: a folder that can be read wherever an actor runs.
        runtime: fields of ``RuntimeOptions`` of each.
        swap: another engine may take its place.
        traces: where each sends them, if anywhere.
        address: of a Ray cluster; None starts Ray on this machine alone.

    Raises:
        EngineError: Ray or a replica did not start.
    """
    # Nothing of ours asks to be counted.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        # "local": not the cluster that some file or variable of this machine names.
        ray.init(
            address=address or "local",
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise EngineError(f"Ray did not start: {error}; check --ray-address, or `ray status` there") from None
    resources: dict[str, float] = {"num_cpus": runtime["num_threads"]}
    if str(runtime.get("device", "")).startswith("cuda"):
        resources["num_gpus"] = 1
    deployment = serve.deployment(Replica).options(
        ray_actor_options=resources,
        max_ongoing_requests=_NO_LIMIT,
        # The server has waited for requests before it comes to this.
        graceful_shutdown_timeout_s=_END_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2,
        health_check_timeout_s=30,
    )
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        targets = [
            serve.RunTarget(
                deployment.options(name=f"replica-{i}").bind(
                    engine,
                    runtime,
                    config,
                    swap,
                    None if traces is None else (traces, f"replica-{i}"),
                ),
                name=f"castiron-{i}",
                route_prefix=None,
            )
            for i in range(replicas)
        ]
        try:
            yield serve.run_many(targets)
        except RuntimeError as error:
            raise EngineError(f"the replicas did not start: {error}") from None
    finally:
        for i in range(replicas):  # not all of Ray Serve: a cluster may have applications of others
            with contextlib.suppress(Exception):  # Ray's; what is left of it ends with it
                serve.delete(f"castiron-{i}")
        ray.shutdown()


def threads_of_each(replicas: int) -> int:
    """An equal part of the CPUs that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // replicas)
