"""Log line, count and response latency of every request."""

import logging
import re
import time

from prometheus_client import Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import request_id
from app.infra.logs.lean_structlog import bound_contextvars

log = logging.getLogger(__name__)

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_RUN = re.compile(r"/runs/(run_[0-9a-z]{26})(?:/|$)")
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RequestMetrics:
    """Counters and latency histogram of requests."""

    def __init__(self) -> None:
        self.answered = Counter(
            "anneal_http_requests", "Requests by response status.", ["method", "route", "status"], registry=None
        )
        self.seconds = Histogram(
            "anneal_http_request_duration_seconds",
            "Seconds from a request to the start of its response, excluding the body, which can stream for days.",
            ["method", "route"],
            buckets=_BUCKETS,
            registry=None,
        )


class RequestMetricsMiddleware:
    """Outermost middleware; adds the request id and the run id to everything logged during a request."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._count_request(scope, status, time.perf_counter() - started)
            await send(message)

        ids = {"request_id": request_id(scope)}
        if run_id := run_id_of(scope):
            ids["run_id"] = run_id
        with bound_contextvars(**ids):
            try:
                await self.app(scope, receive, observed)
            finally:
                self._log_request(scope, status, time.perf_counter() - started)

    def _count_request(self, scope: Scope, status: int, seconds: float) -> None:
        method, route = method_label(scope), route_template(scope)
        self.metrics.answered.labels(method, route, str(status)).inc()
        self.metrics.seconds.labels(method, route).observe(seconds)

    @staticmethod
    def _log_request(scope: Scope, status: int, seconds: float) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        caller = scope["state"].get("caller")
        method, route, ms = method_label(scope), route_template(scope), round(seconds * 1000, 1)
        extra = {
            "method": method,
            "route": route,
            "status": status or None,
            "ms": ms,
            "key_id": None if caller is None else caller.key_id,
        }
        # Path and query are not logged: they can contain keys and private names.
        log.info("%s %s answered with %s", method, route, status or "no response: client disconnected", extra=extra)


def route_template(scope: Scope) -> str:
    """Return the path template of the request's route, which bounds the number of labels; `unmatched` if none."""
    route = scope.get("route")
    if route is not None:
        # A route has only its path below its router, without the router's prefix.
        match = re.search(route.path_regex.pattern.removeprefix("^"), scope["path"])
        prefix = scope["path"][: match.start()] if match else ""
        return f"{prefix}{route.path_format}"
    app = scope.get("app")
    if app is not None and scope["path"] in (app.docs_url, app.openapi_url):
        return str(scope["path"])
    return str(scope.get("root_path") or "unmatched")


def run_id_of(scope: Scope) -> str | None:
    """Return the run id in the request's path, if there is one."""
    match = _RUN.search(scope["path"])
    return match[1] if match else None


def method_label(scope: Scope) -> str:
    """Return the request's method, or `other` for one that no route takes."""
    return scope["method"] if scope["method"] in _METHODS else "other"
