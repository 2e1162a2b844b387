"""Traces: requests and attempts reach a collector, and without one nothing is imported."""

import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from sqlalchemy import Engine

from app.config import Settings
from app.infra.errors import SetupError
from app.infra.logs.tracing import Tracing
from app.runs.state import machine
from tests.http_server import serving
from tests.rows import add_run, add_worker, claim, run_row
from tests.server import ThreadServer
from worker.attempts import supervisor
from worker.attempts.attempt import Attempt
from worker.context import WorkerContext

_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(BaseHTTPRequestHandler):
    """A collector of OpenTelemetry that keeps what it receives."""

    received: list[Any] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") is None and self.path == "/v1/traces":
            self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.received = []
    with serving(Collector) as url:
        yield url


def spans() -> dict[str, Any]:
    resource_spans = [part for one in Collector.received for part in one.resource_spans]
    services = {value.value.string_value for part in resource_spans for value in part.resource.attributes
                if value.key == "service.name"}  # fmt: skip
    assert len(services) == 1
    return {span.name: span for part in resource_spans for scope in part.scope_spans for span in scope.spans}


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


def test_a_request_is_a_span_of_its_callers_trace(collector: str, settings: Settings) -> None:
    with ThreadServer(settings.model_copy(update={"otlp_endpoint": collector})) as api:
        run = "run_" + "0" * 26
        answer = api.client.get(f"/v1/runs/{run}", headers={"traceparent": _PARENT})
        assert answer.status_code == 404
    span = spans()["GET /v1/runs/{run_id}"]
    assert span.trace_id.hex() == _PARENT.split("-")[1] and span.parent_span_id.hex() == _PARENT.split("-")[2]
    assert attributes(span) == {
        "http.request.method": "GET", "http.route": "/v1/runs/{run_id}", "http.response.status_code": 404,
        "anneal.run_id": run, "anneal.request_id": answer.headers["x-request-id"],
    }  # fmt: skip


def test_an_attempt_is_a_span_and_its_error_is_recorded(collector: str) -> None:
    tracing = Tracing(collector, "anneal-worker")
    with pytest.raises(KeyError), tracing.span("attempt", {"anneal.run_id": "run_1", "anneal.attempt": 2}):
        raise KeyError("it broke")
    tracing.close()
    span = spans()["attempt"]
    assert attributes(span) == {"anneal.run_id": "run_1", "anneal.attempt": 2} and span.status.code == 2


def test_a_worker_reports_each_attempt_as_a_span(
    collector: str, settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_run(engine)
    run = claim(engine, add_worker(engine), lease=60.0)
    context = WorkerContext(settings.model_copy(update={"lease_seconds": 60.0, "otlp_endpoint": collector}))
    done = machine.complete(run.id, run.lease_epoch, None, "training is complete")
    monkeypatch.setattr(Attempt, "train", lambda _: done)
    supervisor.supervise_run(context, run, time.monotonic())
    context.tracing.close()
    context.engine.dispose()
    context.lease_engine.dispose()
    assert attributes(spans()["attempt"]) == {"anneal.run_id": run.id, "anneal.attempt": run.attempt}
    (resource,) = {part.resource.SerializeToString() for one in Collector.received for part in one.resource_spans}
    assert b"anneal-worker" in resource and run_row(engine, run.id).status == "completed"


def test_a_collector_that_is_away_delays_nothing() -> None:
    tracing = Tracing("http://127.0.0.1:1", "anneal-api")
    with tracing.span("request", {}):
        pass
    tracing.close()


def test_without_a_collector_no_package_is_needed_and_with_one_the_install_line_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = "import sys, app.main; sys.exit('opentelemetry.sdk.trace' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", script], timeout=60).returncode == 0
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SetupError, match=r"pip install .* '\.\[otel\]'"):
        Tracing("http://collector:4318", "anneal-api")
    with pytest.raises(ValueError, match="without user and password"):
        Settings(otlp_endpoint="http://me:secret@collector:4318")
