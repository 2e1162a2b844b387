"""Stores the reservations of devices and quotas for the first runs of the queue that need several devices.

While a round computes them, claims go on. So it stores them under the locks that claims take, in their order, and
subtracts from the spare devices what was claimed meanwhile.
"""

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.config import Settings
from app.runs.scheduler.forecast import Forecast, read_forecast
from app.runs.scheduler.quotas import choose_quota_reservations
from app.runs.scheduler.reservations import Reservation, WorkerSlots, choose_reservations, fitting_devices
from app.runs.state.queue_order import QUOTA_LOCK

_MOST_SECONDS = 1e9
_IS_NEEDED = text("SELECT EXISTS (SELECT 1 FROM runs WHERE status = 'pending' AND devices_needed > 1)")
_DROP = text("DELETE FROM reservations WHERE NOT worker_id = ANY(:kept)")
_STORE = text("""
    INSERT INTO reservations (worker_id, run_id, devices, starts_at, spare, durations, made_at)
    VALUES (:worker_id, :run_id, :devices, :starts_at, :spare, cast(:durations AS jsonb), clock_timestamp())
    ON CONFLICT (worker_id) DO UPDATE SET run_id = excluded.run_id, devices = excluded.devices,
        starts_at = excluded.starts_at, spare = excluded.spare, durations = excluded.durations,
        made_at = excluded.made_at
""")
_DROP_QUOTAS = text("DELETE FROM quota_reservations WHERE NOT quota_id = ANY(:kept)")
_STORE_QUOTA = text("""
    INSERT INTO quota_reservations (quota_id, run_id, starts_at, spare, durations, made_at)
    VALUES (:quota_id, :run_id, :starts_at, :spare, cast(:durations AS jsonb), clock_timestamp())
    ON CONFLICT (quota_id) DO UPDATE SET run_id = excluded.run_id, starts_at = excluded.starts_at,
        spare = excluded.spare, durations = excluded.durations, made_at = excluded.made_at
""")
_LOCK_SECONDS = 2
_LOCK_QUOTAS = text("SELECT pg_advisory_xact_lock(:key)")
_CLAIMED = text("""
    SELECT runs.created_by, runs.experiment_id FROM devices JOIN runs ON runs.id = devices.run_id
    WHERE NOT devices.run_id = ANY(:known)
""")
_STORED = text("SELECT worker_id FROM reservations")
_LOCK_STORED = text("SELECT worker_id FROM reservations ORDER BY worker_id FOR UPDATE SKIP LOCKED")
_LOCK_DEVICES = text("""
    SELECT worker_id, run_id FROM devices WHERE worker_id = ANY(:workers)
    ORDER BY worker_id, index FOR SHARE SKIP LOCKED
""")


async def reserve(connection: AsyncConnection, settings: Settings, backends: Sequence[str]) -> None:
    """Renew all reservations; those that no run needs any more are dropped."""
    rows: list[dict[str, Any]] = []
    quotas: list[dict[str, Any]] = []
    forecast = None
    if await connection.scalar(_IS_NEEDED):
        forecast = await read_forecast(connection, settings, backends)
        if forecast is not None:
            rows, quotas = await asyncio.to_thread(_rows, forecast)
    await connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'"))
    if quotas:
        await connection.execute(_LOCK_QUOTAS, {"key": QUOTA_LOCK})
    # Those of workers before those of quotas, as claims lock them: in another order each could wait for the other.
    await connection.execute(_DROP, {"kept": [row["worker_id"] for row in rows]})
    if forecast is not None and quotas:
        claimed = (await connection.execute(_CLAIMED, {"known": [run.id for run in forecast.live]})).all()
        for row in quotas:
            row["spare"] = max(row["spare"] - sum(row["quota_id"] in one for one in claimed), 0)
    await connection.execute(_DROP_QUOTAS, {"kept": [row["quota_id"] for row in quotas]})
    if quotas:
        await connection.execute(_STORE_QUOTA, quotas)
    if forecast is not None and rows and (rows := await _unchanging(connection, forecast, rows)):
        await connection.execute(_STORE, rows)


async def _unchanging(
    connection: AsyncConnection, forecast: Forecast, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Lock workers; return the rows of those that no claim is just changing, without the devices claimed meanwhile.

    The others keep their reservations until the next round. To wait for a claim would be a deadlock: it locks the
    reservation of its worker first, then devices.
    """
    stored = set((await connection.execute(_STORED)).scalars())
    busy = stored - set((await connection.execute(_LOCK_STORED)).scalars())
    workers = [row["worker_id"] for row in rows if row["worker_id"] not in busy]
    held: dict[str, list[str | None]] = defaultdict(list)
    for worker_id, run_id in (await connection.execute(_LOCK_DEVICES, {"workers": workers})).tuples():
        held[worker_id].append(run_id)
    known = {worker.worker_id: [device.run_id for device in worker.devices] for worker in forecast.fleet.workers}
    found = []
    for row in rows:
        before, now = known[row["worker_id"]], held[row["worker_id"]]
        if len(now) == len(before):
            claimed = sum(run_id is not None and run_id not in before for run_id in now)
            found.append({**row, "spare": max(row["spare"] - claimed, 0)})
    return found


def _rows(forecast: Forecast) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of both tables."""
    made, fitting = _choose(forecast)
    quotas = [
        {
            "quota_id": one.quota_id,
            "run_id": one.run_id,
            "starts_at": _starts_at(forecast, one.start),
            "spare": one.spare,
            "durations": json.dumps(one.durations),
        }
        for one in choose_quota_reservations(forecast, {one.run.run_id: one.start for one in made})
    ]
    return [_row(forecast, one, fitting) for one in made], quotas


def _choose(forecast: Forecast) -> tuple[list[Reservation], dict[str, dict[int, tuple[int, ...]]]]:
    """Return the reservations, and the devices on which each run fits."""
    slots = forecast.workers
    fitting = fitting_devices(forecast.queue, slots, forecast.fleet.gpu_backends)
    for run in forecast.queue:
        if run.needs.hosts > 1:
            # A paused device takes no run until it is checked: several workers must not be idle for as long.
            fitting[run.run_id] = _usable(slots, fitting[run.run_id], run.needs.devices_each)
    places = {worker.offer.worker_id: at for at, worker in enumerate(slots)}
    held = {
        run: {places[worker] for worker in workers if worker in places} for run, workers in forecast.reserved.items()
    }
    free, alike = [worker.free for worker in slots], [worker.offer.alike for worker in slots]
    return choose_reservations(forecast.queue, fitting, free, 0.0, held, alike), fitting


def _usable(
    slots: Sequence[WorkerSlots], fitting: Mapping[int, tuple[int, ...]], count: int
) -> dict[int, tuple[int, ...]]:
    """Return the workers with at least `count` devices that are not paused, with those."""
    found = {
        at: tuple(device for device in devices if not slots[at].offer.devices[device].paused)
        for at, devices in fitting.items()
    }
    return {at: devices for at, devices in found.items() if len(devices) >= count}


def _row(forecast: Forecast, made: Reservation, fitting: dict[str, dict[int, tuple[int, ...]]]) -> dict[str, Any]:
    worker = forecast.workers[made.worker]
    durations: dict[str, float] = {}
    if 0 < made.start < math.inf:
        for run in forecast.queue:
            if run is not made.run and made.worker in fitting[run.run_id]:
                seconds = forecast.seconds(run, worker.offer)
                if seconds < made.start:
                    durations[run.run_id] = round(seconds, 1)
    return {
        "worker_id": worker.offer.worker_id,
        "run_id": made.run.run_id,
        "devices": made.run.needs.devices_each,
        "starts_at": _starts_at(forecast, made.start),
        "spare": made.spare,
        "durations": json.dumps(durations),
    }


def _starts_at(forecast: Forecast, start: float) -> datetime | None:
    return None if math.isinf(start) else forecast.now + timedelta(seconds=min(start, _MOST_SECONDS))
