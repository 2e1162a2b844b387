"""What Prometheus is told: figures of this process, and those of the database at the moment of the scrape."""

import platform
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.events.stream import Streams
from app.monitoring.requests import RequestMetrics
from app.monitoring.snapshot import Snapshot
from app.queue import Queue
from app.runs.dispatcher import Dispatcher
from app.runs.models import LIVE, TERMINAL

_OUTCOMES = ("lost", "retried", "handed_back", "repaired", *TERMINAL)


class Metrics:
    """Everything that one API process exports, on a registry of its own."""

    def __init__(self, requests: RequestMetrics, streams: Streams, queue: Queue, dispatcher: Dispatcher) -> None:
        # Those would be a second series for each counter, telling when it began.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._service = ServiceCollector(streams, queue)
        for collector in (requests.answered, requests.seconds, streams.lag, dispatcher.losses, self._service):
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    def show(self, snapshot: Snapshot | None) -> None:
        """What the next scrape tells of the database; None: that it is away."""
        self._service.snapshot = snapshot


class ServiceCollector(Collector):
    """Gauges that are read when somebody asks, so that keeping them costs nothing."""

    def __init__(self, streams: Streams, queue: Queue) -> None:
        self._streams = streams
        self._queue = queue
        self.snapshot: Snapshot | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield _gauge(
            "anneal_build_info",
            "Always 1.",
            {("version", "python"): {(version("anneal"), platform.python_version()): 1}},
        )
        yield _gauge("anneal_database_up", "Whether PostgreSQL answered this scrape.", self.snapshot is not None)
        yield _gauge("anneal_broker_up", "Whether this process hears wake-ups over Redis.", self._queue.is_listening)
        live, catching_up, backlog = self._streams.load()
        states = {("live",): live, ("catching_up",): catching_up}
        yield _gauge("anneal_streams", "Open streams of events and logs.", {("state",): states})
        yield _gauge("anneal_stream_backlog_events", "Events read here that streams have yet to take.", backlog)
        if self.snapshot is not None:
            yield from _of_database(self.snapshot)


def _of_database(snapshot: Snapshot) -> Iterator[GaugeMetricFamily]:
    by_status: dict[tuple[str, ...], float] = {("pending",): snapshot.waiting}
    by_status |= {(status,): snapshot.live.get(status, 0) for status in LIVE}
    yield _gauge("anneal_runs", "Runs that have not ended.", {("status",): by_status})
    recent = {(status,): snapshot.recent.get(status, 0) for status in ("pending", *LIVE, *TERMINAL)}
    yield _gauge("anneal_runs_created_last_day", "Runs created within 24 hours, by status now.", {("status",): recent})
    ended = {(outcome,): snapshot.ended.get(outcome, 0) for outcome in (*_OUTCOMES, *snapshot.ended)}
    yield _gauge(
        "anneal_attempts_ended_last_day",
        "Attempts that ended within 24 hours, of runs created in that time or not ended.",
        {("outcome",): ended},
    )
    yield _gauge("anneal_queue_depth", "Runs that wait for a worker.", snapshot.waiting)
    yield _gauge(
        "anneal_queue_oldest_seconds",
        "For how long the run that waits longest could have been taken.",
        snapshot.oldest_waiting_seconds,
    )
    steps = {(run_id,): step for run_id, step, _ in snapshot.steps}
    yield _gauge("anneal_run_step", "Optimizer steps that a live run has done.", {("run_id",): steps})
    totals = {(run_id,): total for run_id, _, total in snapshot.steps if total is not None}
    yield _gauge("anneal_run_planned_steps", "Optimizer steps that a live run will have.", {("run_id",): totals})
    states = {(state,): snapshot.workers.get(state, 0) for state in ("online", "draining")}
    yield _gauge("anneal_workers", "Workers that are heard of.", {("state",): states})
    kinds = {kind for kind, _ in snapshot.devices}
    devices = {
        (kind, "busy" if busy else "free"): snapshot.devices.get((kind, busy), 0)
        for kind in sorted(kinds)
        for busy in (True, False)
    }
    yield _gauge("anneal_devices", "Devices of these workers.", {("kind", "state"): devices})
    yield _gauge("anneal_metrics_query_seconds", "What these figures cost the database.", snapshot.query_seconds)


def _gauge(name: str, what: str, found: Any) -> GaugeMetricFamily:
    """A family of one value, or of `{label names: {label values: value}}`."""
    if not isinstance(found, dict):
        return GaugeMetricFamily(name, what, value=float(found))
    ((labels, values),) = found.items()
    family = GaugeMetricFamily(name, what, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family
