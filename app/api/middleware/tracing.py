"""A span of OpenTelemetry for each request, if the operator names a collector."""

from opentelemetry.trace import Span, Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import request_id
from app.api.middleware.request_metrics import method_label, route_template, run_id_of
from app.infra.logs.tracing import Tracing


class TracingMiddleware:
    """Middleware that records requests up to the start of their responses, whose bodies can stream for days."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        attributes = {"http.request.method": method_label(scope), "anneal.request_id": request_id(scope)}
        with self._tracing.span("request", attributes, headers=Headers(scope=scope), ends_itself=True) as span:

            async def observed(message: Message) -> None:
                if message["type"] == "http.response.start" and span is not None:
                    _finish_span(span, scope, message["status"])
                await send(message)

            try:
                await self.app(scope, receive, observed)
            finally:
                if span is not None and span.is_recording():
                    span.end()


def _finish_span(span: Span, scope: Scope, status: int) -> None:
    route = route_template(scope)
    span.update_name(f"{method_label(scope)} {route}")
    span.set_attributes({"http.route": route, "http.response.status_code": status})
    if run_id := run_id_of(scope):
        span.set_attribute("anneal.run_id", run_id)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
    span.end()
