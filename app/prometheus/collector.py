"""Prometheus metrics of this process, and of the database at the time of the scrape."""

import platform
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from anneal.contracts.run_status import LIVE, TERMINAL
from app.api.middleware.request_metrics import RequestMetrics
from app.infra.broker import Broker
from app.prometheus.snapshot import Snapshot
from app.runs.events.stream import Streams
from app.runs.queue.dispatcher import Dispatcher
from app.webhooks.sender import WebhookSender

_OUTCOMES = ("lost", "retried", "handed_back", "repaired", *TERMINAL)


_TELEMETRY = (
    ("anneal_device_utilization_percent", "utilization_percent", "Share of the time in which a kernel ran"),
    ("anneal_device_memory_used_mebibytes", "memory_mb", "Highest memory in use"),
    ("anneal_device_temperature_celsius", "temperature_celsius", "Highest temperature"),
    ("anneal_device_power_watts", "power_watts", "Mean power draw"),
    ("anneal_device_sm_clock_megahertz", "sm_clock_mhz", "Mean clock of the multiprocessors"),
    ("anneal_device_ecc_uncorrected_errors", "ecc_uncorrected", "Uncorrected memory errors since the driver's start"),
)


class Metrics:
    """All metrics that an API process exports, on a separate registry."""

    def __init__(
        self,
        requests: RequestMetrics,
        streams: Streams,
        queue: Broker,
        dispatcher: Dispatcher,
        webhooks: WebhookSender,
    ) -> None:
        # They would add a `_created` series with the start time for each counter.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._service = ServiceCollector(streams, queue)
        counters = (requests.answered, requests.seconds, streams.lag, dispatcher.losses, webhooks.outcomes)
        for collector in (*counters, self._service):
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)

    def set_snapshot(self, snapshot: Snapshot | None) -> None:
        """Set the database figures for the next scrape; None means that the database is unavailable."""
        self._service.snapshot = snapshot


class ServiceCollector(Collector):
    """Gauges that are computed at scrape time, so that they cost nothing in between."""

    def __init__(self, streams: Streams, queue: Broker) -> None:
        self._streams = streams
        self._queue = queue
        self.snapshot: Snapshot | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield _build_gauge(
            "anneal_build_info",
            "Always 1.",
            {("version", "python"): {(version("anneal"), platform.python_version()): 1}},
        )
        yield _build_gauge("anneal_database_up", "1 if PostgreSQL answered within 3 s.", self.snapshot is not None)
        yield _build_gauge(
            "anneal_broker_up",
            "1 if this process receives notifications over Redis; without them streams poll every second.",
            self._queue.is_listening,
        )
        live, catching_up, backlog = self._streams.measure_load()
        states = {("live",): live, ("catching_up",): catching_up}
        yield _build_gauge(
            "anneal_streams",
            "Open streams of events and logs: live, or catching_up from the database.",
            {("state",): states},
        )
        yield _build_gauge("anneal_stream_backlog_events", "Events read but not yet delivered to streams.", backlog)
        if self.snapshot is not None:
            yield from _database_gauges(self.snapshot)


def _database_gauges(snapshot: Snapshot) -> Iterator[GaugeMetricFamily]:
    by_status: dict[tuple[str, ...], float] = {("pending",): snapshot.waiting}
    by_status |= {(status,): snapshot.live.get(status, 0) for status in LIVE}
    yield _build_gauge("anneal_runs", "Runs that have not ended.", {("status",): by_status})
    recent = {(status,): snapshot.recent.get(status, 0) for status in ("pending", *LIVE, *TERMINAL)}
    yield _build_gauge(
        "anneal_runs_created_last_day",
        "Runs created within 24 hours, by current status; older runs that ended today are not included.",
        {("status",): recent},
    )
    ended = {(outcome,): snapshot.ended.get(outcome, 0) for outcome in (*_OUTCOMES, *snapshot.ended)}
    yield _build_gauge(
        "anneal_attempts_ended_last_day",
        "Attempts that ended within 24 hours, of runs that were created in that time or have not ended: lost (with "
        "their worker), retried, handed_back (by a draining worker), repaired, or the final status of the run.",
        {("outcome",): ended},
    )
    yield _build_gauge("anneal_queue_depth", "Runs that wait for a worker.", snapshot.waiting)
    yield _build_gauge(
        "anneal_queue_oldest_seconds",
        "Seconds for which the longest-waiting run has been ready to start, without the pause before a retry.",
        snapshot.oldest_waiting_seconds,
    )
    yield _build_gauge(
        "anneal_webhook_oldest_seconds",
        "Seconds since the oldest message that is not delivered, of webhooks that are enabled, was enqueued.",
        snapshot.oldest_delivery_seconds,
    )
    steps = {(run_id,): step for run_id, step, _ in snapshot.steps}
    yield _build_gauge(
        "anneal_run_step",
        "Optimizer steps completed by a live run, at most ten seconds ago; the newest 200 runs.",
        {("run_id",): steps},
    )
    totals = {(run_id,): total for run_id, _, total in snapshot.steps if total is not None}
    yield _build_gauge("anneal_run_planned_steps", "Planned optimizer steps of a live run.", {("run_id",): totals})
    states = {(state,): snapshot.workers.get(state, 0) for state in ("online", "draining")}
    yield _build_gauge("anneal_workers", "Workers with a recent heartbeat: online or draining.", {("state",): states})
    kinds = {kind for kind, _ in snapshot.devices}
    devices = {
        (kind, "busy" if busy else "free"): snapshot.devices.get((kind, busy), 0)
        for kind in sorted(kinds)
        for busy in (True, False)
    }
    yield _build_gauge(
        "anneal_devices", "Devices of these workers, cuda or cpu, busy or free.", {("kind", "state"): devices}
    )
    for name, field, what in _TELEMETRY:
        values = {
            (worker_id, uid): sample[field]
            for worker_id, uid, sample in snapshot.telemetry
            if sample.get(field) is not None
        }
        yield _build_gauge(
            name, f"{what} of a GPU, over ten seconds, at most a minute ago.", {("worker_id", "device"): values}
        )
    yield _build_gauge(
        "anneal_metrics_query_seconds",
        "Duration of the query for these figures, including the round trip to the database.",
        snapshot.query_seconds,
    )


def _build_gauge(name: str, what: str, figures: Any) -> GaugeMetricFamily:
    """Create a metric family from one value, or from `{label names: {label values: value}}`."""
    if not isinstance(figures, dict):
        return GaugeMetricFamily(name, what, value=float(figures))
    ((labels, values),) = figures.items()
    family = GaugeMetricFamily(name, what, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family
