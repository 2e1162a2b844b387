"""Reads the online workers and their devices, as the queue sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from app.runs.queue.fit import DeviceOffer, Fleet, Pause, WorkerOffer
from app.runs.queue.holds import StoredHolds
from app.runs.queue.holds_table import CURRENT_PLAN
from app.workers.queries import IS_FRESH, silence_seconds

_GPU_MEMORY_SECONDS = 3600.0
"""Seconds after its last heartbeat for which a worker with a GPU keeps runs that prefer a GPU away from CPUs."""
_LATELY = 0.5
"""Fraction of a lease in which a worker must have sent a heartbeat, of which there are six, to get a part of a run."""
_WORKERS = """
    SELECT workers.id, workers.host, workers.backends, workers.labels, workers.gguf, workers.gguf_quantizer,
        workers.version,
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
    GROUP BY workers.id
"""
_IS_ONLINE = f"workers.state = 'online' AND {IS_FRESH}"
_ONLINE = text(_WORKERS.format(condition=_IS_ONLINE) + "ORDER BY workers.id")
_GPU_BACKENDS = f"""
    SELECT DISTINCT unnest(workers.backends) FROM workers JOIN devices ON devices.worker_id = workers.id
    WHERE devices.kind = 'cuda' AND (
        workers.state <> 'offline' OR workers.heartbeat_at > clock_timestamp() - make_interval(
            secs => {_GPU_MEMORY_SECONDS}
        )
    )
"""
_PAUSE = text("SELECT paused_at, paused_by, reason FROM queue_pause")
# A worker that asks for a run is there, whatever its last heartbeat. Workers of its machine that drain or are silent
# count too: their runs use its memory. As an array, which PostgreSQL takes to be short, so it reads only their devices.
_IS_NEAR = f"""
    workers.id = ANY(array(
        SELECT workers.id FROM workers
        WHERE workers.id = :worker_id
            OR (workers.id IN (SELECT jsonb_object_keys(held) FROM own_holds) AND {_IS_ONLINE})
            OR split_part(workers.boot_id, '/', 1) =
                (SELECT split_part(asking.boot_id, '/', 1) FROM workers AS asking WHERE asking.id = :worker_id)
    ))
"""
_NEAR = text(f"""
    WITH plan AS MATERIALIZED ({CURRENT_PLAN}),
    own_holds AS (
        SELECT hold -> 'devices' AS held FROM plan CROSS JOIN jsonb_array_elements(plan.holds -> 'holds') AS hold
        WHERE hold -> 'devices' ? :worker_id
    ),
    near AS ({_WORKERS.format(condition=_IS_NEAR)})
    SELECT near.*, plan.holds, EXISTS (SELECT FROM queue_pause) AS is_paused,
        cast(extract(epoch FROM clock_timestamp()) AS float) AS now,
        CASE WHEN plan.holds -> 'quota_holds' <> '[]' OR EXISTS (SELECT FROM own_holds)
            THEN plan.seconds -> near.device END AS seconds,
        CASE WHEN near.kind = 'cpu' THEN array({_GPU_BACKENDS}) END AS gpu_backends
    FROM near LEFT JOIN plan ON near.id = :worker_id
    ORDER BY near.id <> :worker_id, near.id
""")


@dataclass(frozen=True)
class NearFleet:
    """Worker that asks for a run, and what limits its claim."""

    worker: WorkerOffer
    fleet: Fleet
    """The worker, the others of its machine, and those that a run holds together with it."""
    holds: StoredHolds
    """Holds of runs; durations only on devices like those of the worker, and only if a hold limits it."""
    now: float
    """Unix time of the database."""
    is_paused: bool = False
    """True while the queue is paused: the worker takes no run."""


async def read_fleet(connection: Any, lease_seconds: float) -> Fleet:
    """Return the workers that claim runs now; `connection` is an async session or connection."""
    rows = (await connection.execute(_ONLINE, _times(lease_seconds))).all()
    with_gpu = (await connection.execute(text(_GPU_BACKENDS))).all()
    return Fleet(_offers(rows), frozenset(row[0] for row in with_gpu), await read_pause(connection))


async def read_pause(connection: Any) -> Pause | None:
    """Return the pause of the queue; None if runs start. `connection` is an async session or connection."""
    row = (await connection.execute(_PAUSE)).one_or_none()
    return None if row is None else Pause(*row)


def read_near_fleet(connection: Connection, worker_id: str, lease_seconds: float) -> NearFleet | None:
    """Return what a claim of a worker needs of the fleet; None if there is no such worker."""
    rows = connection.execute(_NEAR, {"worker_id": worker_id, **_times(lease_seconds)}).all()
    if not rows or rows[0].id != worker_id:
        return None
    asking, offers = rows[0], _offers(rows)
    holds = StoredHolds.model_validate({**(asking.holds or {}), "seconds": {asking.device: asking.seconds or {}}})
    fleet = Fleet(offers, frozenset(asking.gpu_backends or ()))
    return NearFleet(offers[0], fleet, holds, asking.now, asking.is_paused)


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
            row.gguf_quantizer,
            row.joins_hosts,
            row.version,
            row.machine,
        )
        for row in rows
    ]
