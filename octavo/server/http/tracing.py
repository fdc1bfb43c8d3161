"""OpenTelemetry traces (`octavo[otel]`): a span for each request, with queue, prefill and decode
spans.

Spans are created after a request has finished, from the times in its metrics, so that tracing adds
no cost during generation. A client's `traceparent` is the parent. Attribute names follow
OpenTelemetry's conventions for HTTP and generative AI.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from octavo.api.errors import ConfigError
from octavo.api.outputs import RequestOutput
from octavo.server.http.request_log import FinishedRequest
from octavo.server.settings import ServerSettings
from octavo.utils.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

NS = 10**9


class Tracer:
    """Observer of finished requests that creates spans."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "octavo", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @staticmethod
    def of(settings: ServerSettings) -> Tracer | None:
        """Returns a tracer for the configured endpoint; None without one."""
        if settings.otlp_traces_endpoint is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"otlp_traces_endpoint: a required package is missing: {error}",
                hint="pip install 'octavo[otel]'",
            ) from error
        return Tracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otlp_traces_endpoint)))

    def __call__(self, finished: FinishedRequest) -> None:
        from opentelemetry import trace

        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in finished.scope["headers"]
        }
        epoch_s = time.time() - time.monotonic()
        route = getattr(finished.scope.get("route"), "path", "")
        span = self._tracer.start_span(
            f"{finished.scope['method']} {route}".strip(),
            self._propagator.extract(headers),
            trace.SpanKind.SERVER,
            {
                "http.request.method": finished.scope["method"],
                "http.route": route,
                "http.response.status_code": finished.status,
                "octavo.request_id": finished.record.request_id,
                "octavo.key": finished.record.owner,
            },
            start_time=int((epoch_s + finished.started_s) * NS),
        )
        if finished.status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        for output in finished.record.outputs:
            for name, start_s, end_s in _phases(output):
                phase = self._tracer.start_span(
                    name,
                    inside,
                    attributes=_usage(output),
                    start_time=int((epoch_s + start_s) * NS),
                )
                phase.end(int((epoch_s + end_s) * NS))
        span.end(int((epoch_s + finished.started_s + finished.duration_s) * NS))

    def close(self) -> None:
        """Flushes pending spans."""
        self._provider.shutdown()


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Returns the span attributes of one prompt."""
    num_output_tokens = output.metrics.num_generation_tokens if output.metrics is not None else 0
    return {
        "gen_ai.response.id": output.request_id,
        "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.output_tokens": num_output_tokens,
        "octavo.cached_tokens": output.num_cached_tokens,
    }


def _phases(output: RequestOutput) -> Iterator[tuple[str, float, float]]:
    """Yields (name, start, end) of each phase, on the monotonic clock, in seconds."""
    metrics = output.metrics
    if metrics is None or metrics.scheduled_ts is None:
        return
    yield "queue", metrics.arrival_time, metrics.scheduled_ts
    if metrics.first_token_ts is None or metrics.last_token_ts is None:
        return
    yield "prefill", metrics.scheduled_ts, metrics.first_token_ts
    yield "decode", metrics.first_token_ts, metrics.last_token_ts
