"""Endpoint `GET /metrics` for Prometheus."""

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from app.prometheus.collector import Metrics
from app.prometheus.snapshot import Snapshots

router = APIRouter(tags=["health"])

_EXAMPLE = (
    "# HELP anneal_queue_depth Runs that wait for a worker.\n# TYPE anneal_queue_depth gauge\nanneal_queue_depth 3.0\n"
)


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus text format, or OpenMetrics if `Accept` requests it.",
            "content": {
                "text/plain": {"schema": {"type": "string"}, "example": _EXAMPLE},
                "application/openmetrics-text": {"schema": {"type": "string"}},
            },
        }
    },
)
async def get_metrics(request: Request) -> Response:
    """Return metrics for Prometheus; without the database, only those of this process and `anneal_database_up 0`."""
    metrics: Metrics = request.app.state.metrics
    snapshots: Snapshots = request.app.state.snapshots
    metrics.set_snapshot(await snapshots.latest_snapshot())
    try:
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
    except (TypeError, ValueError):  # the requested version is not a number
        encode, media_type = choose_encoder("")
    return Response(encode(metrics.registry), headers={"Content-Type": media_type, "Cache-Control": "no-store"})
