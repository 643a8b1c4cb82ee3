"""Prometheus metrics, by the names that dashboards for vLLM know, with the prefix ``castiron:``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from ..session import Session
    from .tracing import OutputTimes

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_E2E = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TPOT = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
)


_ENGINE_COUNTERS = (
    ("engine_steps", "Steps that the engine has run.", "steps"),
    ("num_preemptions", "Times that a request was set back for want of KV blocks.", "preemptions"),
    ("recomputed_tokens", "Tokens computed again after that.", "recomputed_tokens"),
    ("prefix_cache_queries", "Prompt tokens looked for in the KV cache.", "prefix_query_tokens"),
    ("prefix_cache_hits", "Prompt tokens found there.", "prefix_cached_tokens"),
    ("spec_decode_num_draft_tokens", "Guessed tokens that were checked.", "draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Guessed tokens that were right.", "accepted_tokens"),
    ("kv_blocks_evicted", "Cached blocks given up for others.", "kv_blocks_evicted"),
    ("kv_host_blocks_saved", "Of them: copied to the host tier.", "kv_host_blocks_saved"),
    ("kv_host_tokens_restored", "Tokens copied back from the host tier.", "kv_host_tokens_restored"),
    ("kv_disk_blocks_spilled", "Blocks written to the disk tier.", "kv_disk_blocks_spilled"),
    ("kv_disk_blocks_fetched", "Blocks read back from the disk tier.", "kv_disk_blocks_fetched"),
)


class Metrics:
    """What the server counts; gauges are read from the engine when they are asked for.

    Args:
        session: gives the engine's session, where the gauges come from.
        model_name: value of the label ``model_name``.
    """

    def __init__(self, session: Callable[[], Session], model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        limit = session().info.max_seq_len
        self._registry.register(_EngineGauges(session, model_name))

        def counter(name: str, text: str, *labels: str) -> Counter:
            made = Counter(f"castiron:{name}", text, ("model_name", *labels), registry=self._registry)
            return made if labels else made.labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            made = Histogram(
                f"castiron:{name}", text, ("model_name",), buckets=buckets, registry=self._registry
            )
            return made.labels(model_name)

        self._model_name = model_name
        self._finished = counter("request_success", "Finished requests by reason.", "finished_reason")
        self._refused = counter("request_refused", "Requests answered with an error, by status.", "status")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.")
        self._cached_tokens = counter("prompt_cached_tokens", "Prompt tokens found in the KV cache.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._ttft = histogram("time_to_first_token_seconds", "Seconds from request to first token.", _TTFT)
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean seconds between tokens.", _TPOT)
        self._e2e = histogram("e2e_request_latency_seconds", "Seconds from request to last token.", _E2E)
        self._phases = {
            name: histogram(f"request_{name}_time_seconds", f"Seconds that a request was in {name}.", _E2E)
            for name in ("queue", "prefill", "decode")
        }
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _series(limit))
        self._generation = histogram("request_generation_tokens", "New tokens of a request.", _series(limit))

    def refused(self, status: int) -> None:
        """Count an answer with an error."""
        self._refused.labels(self._model_name, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        """Record the time from a request to its first token."""
        self._ttft.observe(seconds)

    def finished(self, times: OutputTimes, prompt_tokens: int, cached_tokens: int) -> None:
        """Record one finished output."""
        tokens = times.tokens
        self._finished.labels(self._model_name, times.finish_reason).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._generation_tokens.inc(tokens)
        self._prompt.observe(prompt_tokens)
        self._generation.observe(tokens)
        self._e2e.observe(times.ended - times.submitted)
        for name, begin, end in times.phases():
            self._phases[name].observe(end - begin)
        if tokens > 1 and times.first_token is not None:
            self._tpot.observe((times.ended - times.first_token) / (tokens - 1))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


class _EngineGauges(Collector):
    """Gauges and counters from ``core.stats``."""

    def __init__(self, session: Callable[[], Session], model_name: str) -> None:
        self._session = session
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Read the engine once for each scrape."""
        stats = self._session().core.stats()
        total = stats.get("kv_blocks_total", 0)
        values = {
            "num_requests_running": ("Requests in the running batch.", stats.get("running", 0)),
            "num_requests_waiting": ("Requests that wait.", stats.get("waiting", 0)),
            "kv_cache_usage_perc": (
                "Used part of the KV cache, 0 to 1.",
                stats.get("kv_blocks_used", 0) / total if total else 0.0,
            ),
            "kv_blocks_total": ("Blocks of the KV cache.", total),
            "kv_blocks_used": ("Blocks that running requests hold.", stats.get("kv_blocks_used", 0)),
            "kv_blocks_cached": (
                "Blocks kept for prompts to come; evicted when room is short.",
                stats.get("kv_blocks_cached", 0),
            ),
            "kv_blocks_free": ("Free blocks.", stats.get("kv_blocks_free", 0)),
            "kv_window_blocks_total": (
                "Window blocks: of layers with a window, where others have none.",
                stats.get("kv_window_blocks_total", 0),
            ),
            "kv_window_blocks_used": (
                "Window blocks that running requests read.",
                stats.get("kv_window_blocks_used", 0),
            ),
            "kv_host_blocks": ("Blocks that the host tier holds.", stats.get("kv_host_blocks", 0)),
            "kv_host_bytes": ("Memory of the host tier.", stats.get("kv_host_bytes", 0)),
            "kv_disk_blocks": ("Blocks that the disk tier holds.", stats.get("kv_disk_blocks", 0)),
            "lora_adapters": ("LoRA adapters in memory.", stats.get("lora_adapters", 0)),
            "lora_bytes": ("Their memory.", stats.get("lora_bytes", 0)),
            "num_tokens_waiting": ("Tokens of the requests that wait.", stats.get("waiting_tokens", 0)),
        }
        for name, (text, value) in values.items():
            family = GaugeMetricFamily(f"castiron:{name}", text, labels=("model_name",))
            family.add_metric((self._model_name,), float(value))
            yield family
        for name, text, key in _ENGINE_COUNTERS:
            count = CounterMetricFamily(f"castiron:{name}", text, labels=("model_name",))
            count.add_metric((self._model_name,), float(stats.get(key, 0)))
            yield count


def _series(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``limit``."""
    found: list[float] = []
    scale = 1
    while scale <= limit:
        found += [scale * m for m in (1, 2, 5) if scale * m <= limit]
        scale *= 10
    return tuple(found)
