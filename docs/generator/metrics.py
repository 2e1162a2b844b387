"""Page of the Prometheus metrics: every metric that an API process exports, with its labels and help text."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from anneal.contracts.device_telemetry import DeviceTelemetry
from app.api.middleware.request_metrics import RequestMetrics
from app.config import Settings
from app.infra.broker import Broker
from app.infra.db import async_engine
from app.prometheus.collector import ServiceCollector
from app.prometheus.snapshot import Snapshot
from app.runs.events.stream import Streams
from app.runs.queue.dispatcher import Dispatcher
from app.webhooks.sender import WebhookSender
from docs.generator import markdown

_INTRO = """\
`GET /metrics` of each API process. Metrics *of the service* come from the database and have the same value in every
process: aggregate them with `max`. Metrics *of the process* start at 0 with the process: use `rate` or `increase`, then
`sum`. [Monitoring](../operations/monitoring.md) describes the scrape configuration, the dashboard and the alerts.

"""
_SNAPSHOT = Snapshot(
    live={},
    waiting=0,
    oldest_waiting_seconds=0.0,
    oldest_delivery_seconds=0.0,
    recent={},
    ended={},
    steps=[("run_1", 1, 2)],
    workers={},
    devices={("cpu", True): 1},
    telemetry=[
        (
            "wrk_1",
            "GPU-1",
            DeviceTelemetry(
                seconds=10,
                utilization_percent=0,
                memory_mb=0,
                temperature_celsius=0,
                power_watts=0,
                sm_clock_mhz=0,
                ecc_uncorrected=0,
            ).model_dump(),
        )
    ],
    query_seconds=0.0,
)


def page() -> str:
    """Return the page."""
    rows = []
    for family, labels, scope in sorted(_families(), key=lambda family: (family[2] == "process", family[0].name)):
        name = f"`{family.name}{'_total' if family.type == 'counter' else ''}`"
        kind = "Histogram. " if family.type == "histogram" else ""
        words = ", ".join(f"`{label}`" for label in labels)
        rows.append((name, words, scope, kind + markdown.escape(family.documentation)))
    text = (
        markdown.header("Prometheus metrics", "the collectors in `app/prometheus` and the modules that count") + _INTRO
    )
    return text + markdown.table(("metric", "labels", "of", "meaning"), rows).rstrip("\n") + "\n"


def _families() -> Iterator[tuple[Metric, tuple[str, ...], str]]:
    """Yield each metric family with its labels, and "service" or "process"."""
    settings = Settings(database_url="postgresql://localhost/anneal", redis_url="redis://localhost")
    engine, broker, requests = async_engine(settings.database_url or ""), Broker(settings), RequestMetrics()
    streams, dispatcher = Streams(engine, broker), Dispatcher(engine, broker, settings)
    webhooks = WebhookSender(engine, settings)
    service = ServiceCollector(streams, broker)
    of_process = {family.name for family in service.collect()}
    service.snapshot = _SNAPSHOT
    counted = (requests.answered, requests.seconds, streams.lag, dispatcher.losses, webhooks.outcomes)
    collectors: tuple[Collector, ...] = (service, *counted, ProcessCollector(registry=CollectorRegistry()))
    for collector in collectors:
        for family in collector.collect():
            labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
            declared = tuple(getattr(collector, "_labelnames", ()))
            is_service = collector is service and family.name not in of_process
            yield family, declared or tuple(labels), "service" if is_service else "process"
