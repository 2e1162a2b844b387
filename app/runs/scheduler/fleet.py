"""Reads the online workers and their devices, as the queue sees them."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import text

from app.runs.queue.fit import DeviceOffer, Fleet, WorkerOffer
from app.runs.state.fitting import GPU_MEMORY_SECONDS
from app.runs.state.group_claim import LATELY
from app.workers.queries import IS_FRESH, silence_seconds

_WORKERS = text(f"""
    SELECT workers.id, workers.host, workers.backends, workers.labels, workers.gguf, workers.version,
        workers.group_address IS NOT NULL AND workers.heartbeat_at > clock_timestamp() - make_interval(secs => :lately)
            AS joins_hosts, min(devices.kind) AS kind,
        min(devices.name) AS device,
        min(split_part(workers.boot_id, '/', 1)) FILTER (WHERE devices.kind = 'cpu') AS machine,
        json_agg(json_build_array(devices.memory_mb, devices.run_id,
            coalesce(devices.paused_until > clock_timestamp(), false), devices.name,
            coalesce(cast(holders.requirements ->> 'memory_mb' AS integer),
                cast(holders.requirements -> 'estimated_mb' ->> devices.kind AS integer), 0)
        ) ORDER BY devices.index) AS devices
    FROM workers JOIN devices ON devices.worker_id = workers.id LEFT JOIN runs AS holders ON holders.id = devices.run_id
    WHERE workers.state = 'online' AND {IS_FRESH}
    GROUP BY workers.id ORDER BY workers.id
""")
_GPU_BACKENDS = text("""
    SELECT DISTINCT unnest(workers.backends) FROM workers JOIN devices ON devices.worker_id = workers.id
    WHERE devices.kind = 'cuda'
        AND (workers.state <> 'offline' OR workers.heartbeat_at > clock_timestamp() - make_interval(secs => :seconds))
""")


async def read_fleet(connection: Any, lease_seconds: float) -> Fleet:
    """Return the workers that claim runs now; `connection` is an async session or connection."""
    # A claim of several workers at once takes none that may just have died.
    times = {"silence": silence_seconds(lease_seconds), "lately": lease_seconds * LATELY}
    rows: Sequence[Any] = (await connection.execute(_WORKERS, times)).all()
    with_gpu = (await connection.execute(_GPU_BACKENDS, {"seconds": GPU_MEMORY_SECONDS})).all()
    workers = [
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
    return Fleet(workers, frozenset(row[0] for row in with_gpu))
