"""OpenTelemetry traces of requests and attempts, sent to a collector that the operator names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from app.infra.errors import SetupError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_EXPORT_SECONDS = 5.0
"""Time limit of an export: a collector that does not answer costs its spans, and hardly delays the end."""


class Tracing:
    """Spans of one process; without a collector every call does nothing."""

    def __init__(self, endpoint: str | None, service: str) -> None:
        """Start to export spans of `service` (`anneal-api`, `anneal-worker`) to a collector, if there is one.

        Raises:
            SetupError: the packages of OpenTelemetry are not installed.
        """
        self._provider: Any = None
        if endpoint is None:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            raise SetupError(
                "ANNEAL_OTLP_ENDPOINT is set, but the packages of OpenTelemetry are not installed: run "
                "`pip install -c constraints.txt -e '.[otel]'` in the clone of Anneal, or unset it."
            ) from None
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service, "service.version": version("anneal")}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))

    @property
    def is_on(self) -> bool:
        """True if spans are exported."""
        return self._provider is not None

    @contextmanager
    def span(
        self,
        name: str,
        attributes: Mapping[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        ends_itself: bool = False,
    ) -> "Iterator[Span | None]":
        """Record the block as a span; yields None if no spans are exported.

        `headers` are those of a request, which may name the span of the caller. With `ends_itself` the block ends the
        span before its own end.
        """
        if self._provider is None:
            yield None
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = None if headers is None else TraceContextTextMapPropagator().extract(dict(headers))
        tracer = self._provider.get_tracer("anneal")
        with tracer.start_as_current_span(
            name,
            context=parent,
            kind=SpanKind.INTERNAL if headers is None else SpanKind.SERVER,
            attributes=dict(attributes),
            end_on_exit=not ends_itself,
        ) as span:
            yield span

    def close(self) -> None:
        """Export what is left, for a limited time."""
        if self._provider is not None:
            self._provider.shutdown()
