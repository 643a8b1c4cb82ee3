"""OpenTelemetry: a span for each HTTP request, and below it queue, prefill and decode of each output."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from castiron.errors import EngineError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span
    from starlette.datastructures import Headers


@dataclass(frozen=True, slots=True)
class OutputTimes:
    """When an output did what, in seconds of ``time.perf_counter``; None = it never came to that.

    Attributes:
        index: of the choice.
        submitted: it was given to the engine.
        started: it left the engine's queue.
        first_token, ended: its first token and its end reached the event loop.
    """

    index: int
    submitted: float
    started: float | None
    first_token: float | None
    ended: float
    tokens: int
    finish_reason: str

    def phases(self) -> list[tuple[str, float, float]]:
        """Names, beginnings and ends of what it went through."""
        found = [("queue", self.submitted, self.started or self.ended)]
        if self.started is not None:
            found.append(("prefill", self.started, self.first_token or self.ended))
        if self.first_token is not None:
            found.append(("decode", self.first_token, self.ended))
        return found


class Tracer:
    """Makes spans and sends them from a thread of its own, in batches.

    Args:
        endpoint: an OTLP collector's address for traces, over HTTP: http://localhost:4318/v1/traces.
        instance: tells this process from others of the same service.
        exporter: in place of the endpoint (tests).

    Raises:
        EngineError: OpenTelemetry is not installed.
    """

    def __init__(
        self, endpoint: str, instance: str | None = None, exporter: SpanExporter | None = None
    ) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as e:
            raise EngineError(
                f"traces need OpenTelemetry, which is not installed ({e}). Run: pip install 'castiron[otel]'"
            ) from None
        self.endpoint = endpoint
        resource = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "castiron")}
        if instance is not None:
            resource["service.instance.id"] = instance
        self._provider = TracerProvider(resource=Resource.create(resource))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("castiron.server")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, path: str, headers: Headers, request_id: str) -> Trace:
        """Start a request's span, below the client's own where it sends a ``traceparent``."""
        from opentelemetry.trace import SpanKind

        attributes = {"http.request.method": method, "url.path": path, "castiron.request_id": request_id}
        parent = self._propagator.extract(dict(headers))
        span = self._tracer.start_span(f"{method} {path}", parent, SpanKind.SERVER, attributes)
        return Trace(self._tracer, self._propagator, span)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class Trace:
    """One request's span."""

    def __init__(self, tracer: Any, propagator: Any, span: Span) -> None:
        self._tracer = tracer
        self._propagator = propagator
        self._span = span
        #: Spans have the time of day, in nanoseconds.
        self._epoch_ns = time.time_ns() - int(time.perf_counter() * 1e9)

    def headers(self) -> dict[str, str]:
        """What a request to another process carries, so that its span lies below this one."""
        from opentelemetry.trace import set_span_in_context

        carried: dict[str, str] = {}
        self._propagator.inject(carried, set_span_in_context(self._span))
        return carried

    def output(self, times: OutputTimes) -> None:
        """Add the spans of an output that has ended."""
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._span)
        attributes = {
            "castiron.output": times.index,
            "gen_ai.usage.output_tokens": times.tokens,
            "gen_ai.response.finish_reasons": [times.finish_reason],
        }
        for name, begin, end in times.phases():
            made = self._tracer.start_span(
                name, context, attributes=attributes, start_time=self._epoch_ns + int(begin * 1e9)
            )
            made.end(self._epoch_ns + int(end * 1e9))

    def end(self, status: int, prompt_tokens: int, completion_tokens: int) -> None:
        """The request is answered."""
        from opentelemetry.trace import StatusCode

        span = self._span
        span.set_attribute("http.response.status_code", status)
        if prompt_tokens:
            span.set_attribute("gen_ai.usage.input_tokens", prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", completion_tokens)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()
