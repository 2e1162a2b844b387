"""Service state read from the database in one statement, whose cost does not grow with the number of past runs."""

import asyncio
import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from app.config import Settings
from app.infra.clock import utc_now
from app.infra.ids import id_at
from app.workers.queries import IS_FRESH, silence_seconds

log = logging.getLogger(__name__)

FRESH_SECONDS = 5.0
"""Maximum age of a snapshot, so that several scrapers cost the database no more than one."""
MOST_RECENT = 100_000
"""Maximum number of runs of the last day that are counted."""
MOST_LIVE = 200
"""Maximum number of live runs with individual figures; the newest ones are used."""
MOST_DEVICES = 1000
"""Maximum number of devices with individual figures."""
_WINDOW = timedelta(hours=24)
_TIMEOUT_SECONDS = 3.0

# Live and pending runs are few and have partial indexes, which require literal statuses. Ended runs accumulate, so only
# those created within a day are read, a range of the primary key.
_QUERY = text(
    f"""
    WITH live AS MATERIALIZED (
        SELECT id, status, current_step, total_steps FROM runs
        WHERE status IN ('initializing', 'running', 'checkpointing')
    ), waiting AS MATERIALIZED (
        SELECT id, attempt, not_before FROM runs WHERE status = 'pending'
    ), recent AS MATERIALIZED (
        SELECT id, status FROM runs WHERE id >= :since ORDER BY id DESC LIMIT :most_recent
    ), ended AS (
        SELECT outcome FROM run_attempts
        WHERE run_id >= (SELECT min(id) FROM recent) AND ended_at > now() - make_interval(secs => :window)
        UNION ALL
        SELECT outcome
        FROM (SELECT id FROM live UNION ALL SELECT id FROM waiting WHERE attempt > 0) AS unfinished
            JOIN run_attempts ON run_id = id
        WHERE id < coalesce((SELECT min(id) FROM recent), 'run_z') AND ended_at > now() - make_interval(secs => :window)
    ), present AS (
        SELECT id, state FROM workers
        WHERE state <> 'offline' AND {IS_FRESH}
    )
    SELECT
        (SELECT json_object_agg(status, n) FROM (SELECT status, count(*) AS n FROM live GROUP BY status) AS s) AS live,
        (SELECT count(*) FROM waiting) AS waiting,
        (SELECT extract(epoch FROM greatest(now() - min(not_before), interval '0')) FROM waiting) AS oldest,
        (SELECT extract(epoch FROM greatest(now() - min(d.created_at), interval '0')) FROM webhooks CROSS JOIN LATERAL (
            SELECT created_at FROM webhook_deliveries WHERE webhook_id = webhooks.id AND status = 'pending'
            ORDER BY created_at LIMIT 1
        ) AS d WHERE enabled) AS oldest_delivery,
        (SELECT json_object_agg(status, n)
            FROM (SELECT status, count(*) AS n FROM recent GROUP BY status) AS s) AS recent,
        (SELECT json_object_agg(outcome, n)
            FROM (SELECT outcome, count(*) AS n FROM ended GROUP BY outcome) AS s) AS ended,
        (SELECT json_agg(json_build_array(id, current_step, total_steps))
            FROM (SELECT id, current_step, total_steps FROM live ORDER BY id DESC LIMIT :most_live) AS s) AS steps,
        (SELECT json_object_agg(state, n)
            FROM (SELECT state, count(*) AS n FROM present GROUP BY state) AS s) AS workers,
        (SELECT json_agg(json_build_array(kind, busy, n)) FROM (
            SELECT kind, run_id IS NOT NULL AS busy, count(*) AS n
            FROM devices JOIN present ON present.id = worker_id GROUP BY 1, 2
        ) AS s) AS devices,
        (SELECT json_agg(json_build_array(worker_id, uid, telemetry)) FROM (
            SELECT worker_id, uid, telemetry FROM devices JOIN present ON present.id = worker_id
            WHERE CAST(telemetry ->> 'at' AS timestamptz) > now() - interval '1 min'
            ORDER BY worker_id, devices.index LIMIT :most_devices
        ) AS s) AS telemetry
    """
)


@dataclass(frozen=True)
class Snapshot:
    """State of the service at one time."""

    live: dict[str, int]
    """Runs owned by a worker, by status."""
    waiting: int
    oldest_waiting_seconds: float
    oldest_delivery_seconds: float
    """Age of the oldest message of an enabled webhook that is not delivered."""
    recent: dict[str, int]
    """Runs created within the last day, by current status."""
    ended: dict[str, int]
    """Attempts that ended within the last day, of these runs and of unfinished ones, by outcome."""
    steps: list[tuple[str, int, int | None]]
    """Run id, current step and total steps of live runs."""
    workers: dict[str, int]
    devices: dict[tuple[str, bool], int]
    """Number of devices by (kind, True if a run uses it)."""
    telemetry: list[tuple[str, str, dict[str, Any]]]
    """Worker id, device uid and `DeviceTelemetry` of the GPUs of these workers, at most a minute old."""
    query_seconds: float


class Snapshots:
    """Cache of the newest snapshot; refreshed on request if it is older than `FRESH_SECONDS`."""

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        """Create the cache; do not share `engine` with requests, whose load could look like a database outage."""
        self._engine = engine
        self._silence = silence_seconds(settings.lease_seconds)
        self._lock = asyncio.Lock()
        self._taken_at = -FRESH_SECONDS
        self._latest: Snapshot | None = None

    async def latest_snapshot(self) -> Snapshot | None:
        """Return a snapshot at most `FRESH_SECONDS` old; None if the database does not answer."""
        async with self._lock:
            if time.monotonic() - self._taken_at >= FRESH_SECONDS:
                self._latest = await self._take_snapshot()
                self._taken_at = time.monotonic()
        return self._latest

    async def _take_snapshot(self) -> Snapshot | None:
        started = time.monotonic()
        values = {
            "since": id_at("run", utc_now() - _WINDOW),
            "window": _WINDOW.total_seconds(),
            "silence": self._silence,
            "most_recent": MOST_RECENT,
            "most_live": MOST_LIVE,
            "most_devices": MOST_DEVICES,
        }
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS), self._engine.connect() as connection:
                row = (await connection.execute(_QUERY, values)).one()
        except (SQLAlchemyError, OSError) as error:  # TimeoutError is an OSError
            log.warning("metrics without database figures: %s", str(error) or "the database did not answer in time")
            return None
        return _snapshot_of(row, time.monotonic() - started)


def _snapshot_of(row: Any, seconds: float) -> Snapshot:
    return Snapshot(
        live=row.live or {},
        waiting=row.waiting,
        oldest_waiting_seconds=float(row.oldest or 0),
        oldest_delivery_seconds=float(row.oldest_delivery or 0),
        recent=row.recent or {},
        ended=row.ended or {},
        steps=[(run_id, step, total) for run_id, step, total in row.steps or []],
        workers=row.workers or {},
        devices={(kind, busy): count for kind, busy, count in row.devices or []},
        telemetry=[(worker_id, uid, sample) for worker_id, uid, sample in row.telemetry or []],
        query_seconds=seconds,
    )
