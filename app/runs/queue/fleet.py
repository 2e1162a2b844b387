"""Reads the online workers and their devices, as the queue sees them."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, text

from app.runs.queue.fit import DeviceOffer, Fleet, WorkerOffer
from app.workers.queries import IS_FRESH, silence_seconds

_GPU_MEMORY_SECONDS = 3600.0
"""Seconds after its last heartbeat for which a worker with a GPU keeps runs that prefer a GPU away from CPUs."""
_LATELY = 0.5
"""Fraction of a lease in which a worker must have sent a heartbeat, of which there are six, to get a part of a run."""
_WORKERS = """
    SELECT workers.id, workers.host, workers.backends, workers.labels, workers.gguf, workers.version,
        workers.state = 'online' AND workers.group_address IS NOT NULL
            AND workers.heartbeat_at > clock_timestamp() - make_interval(secs => :lately) AS joins_hosts,
        min(devices.kind) AS kind, min(devices.name) AS device,
        min(split_part(workers.boot_id, '/', 1)) FILTER (WHERE devices.kind = 'cpu') AS machine,
        json_agg(json_build_array(devices.memory_mb, devices.run_id,
            coalesce(devices.paused_until > clock_timestamp(), false), devices.name,
            coalesce(cast(holders.requirements ->> 'memory_mb' AS integer),
                cast(holders.requirements -> 'estimated_mb' ->> devices.kind AS integer), 0),
            devices.index
        ) ORDER BY devices.index) AS devices
    FROM workers JOIN devices ON devices.worker_id = workers.id LEFT JOIN runs AS holders ON holders.id = devices.run_id
    WHERE {condition}
    GROUP BY workers.id ORDER BY workers.id
"""
_IS_ONLINE = f"workers.state = 'online' AND {IS_FRESH}"
_ONLINE = text(_WORKERS.format(condition=_IS_ONLINE))
# A worker that asks for a run is there, whatever its last heartbeat. Workers of its machine that drain or are silent
# count too: their runs use its memory.
_NEAR = text(
    _WORKERS.format(
        condition=f"""workers.id = :worker_id OR (workers.id = ANY(:partners) AND {_IS_ONLINE})
            OR split_part(workers.boot_id, '/', 1) =
                (SELECT split_part(asking.boot_id, '/', 1) FROM workers AS asking WHERE asking.id = :worker_id)"""
    )
)
_GPU_BACKENDS = text("""
    SELECT DISTINCT unnest(workers.backends) FROM workers JOIN devices ON devices.worker_id = workers.id
    WHERE devices.kind = 'cuda'
        AND (workers.state <> 'offline' OR workers.heartbeat_at > clock_timestamp() - make_interval(secs => :seconds))
""").bindparams(seconds=_GPU_MEMORY_SECONDS)


async def read_fleet(connection: Any, lease_seconds: float) -> Fleet:
    """Return the workers that claim runs now; `connection` is an async session or connection."""
    rows = (await connection.execute(_ONLINE, _times(lease_seconds))).all()
    with_gpu = (await connection.execute(_GPU_BACKENDS)).all()
    return Fleet(_offers(rows), frozenset(row[0] for row in with_gpu))


def read_near_fleet(
    connection: Connection, worker_id: str, partners: Sequence[str], lease_seconds: float
) -> tuple[WorkerOffer | None, Fleet]:
    """Return a worker that asks for a run, and with it the other workers of its machine, and `partners`."""
    where = {"worker_id": worker_id, "partners": list(partners), **_times(lease_seconds)}
    offers = _offers(connection.execute(_NEAR, where).all())
    worker = next((offer for offer in offers if offer.worker_id == worker_id), None)
    if worker is None or worker.kind == "cuda":
        return worker, Fleet(offers)
    return worker, Fleet(offers, frozenset(connection.execute(_GPU_BACKENDS).scalars()))


def _times(lease_seconds: float) -> dict[str, float]:
    # A claim of several workers at once takes none that may just have died.
    return {"silence": silence_seconds(lease_seconds), "lately": lease_seconds * _LATELY}


def _offers(rows: Sequence[Any]) -> list[WorkerOffer]:
    return [
        WorkerOffer(
            row.id,
            frozenset(row.backends),
            row.kind,
            row.device,
            tuple(DeviceOffer(memory_mb or 0, *rest) for memory_mb, *rest in row.devices),
            frozenset(row.labels),
            row.host,
            row.gguf,
            row.joins_hosts,
            row.version,
            row.machine,
        )
        for row in rows
    ]
