"""Stores the reservations of devices for the first runs of the queue that need several."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.config import Settings
from app.runs.scheduler.forecast import Forecast, read_forecast
from app.runs.scheduler.reservations import Reservation, choose_reservations
from app.runs.scheduler.simulation import WorkerSlots, fitting_devices

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


async def reserve(connection: AsyncConnection, settings: Settings, backends: Sequence[str]) -> None:
    """Renew all reservations; those that no run needs any more are dropped."""
    rows: list[dict[str, Any]] = []
    if await connection.scalar(_IS_NEEDED):
        forecast = await read_forecast(connection, settings, backends)
        if forecast is not None:
            rows = await asyncio.to_thread(_rows, forecast)
    await connection.execute(_DROP, {"kept": [row["worker_id"] for row in rows]})
    if rows:
        await connection.execute(_STORE, rows)


def _rows(forecast: Forecast) -> list[dict[str, Any]]:
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
    free, models = [worker.free for worker in slots], [worker.offer.model for worker in slots]
    made = choose_reservations(forecast.queue, fitting, free, 0.0, held, models)
    return [_row(forecast, one, fitting) for one in made]


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
                seconds = forecast.seconds(run, worker)
                if seconds < made.start:
                    durations[run.run_id] = round(seconds, 1)
    known = made.start < math.inf
    return {
        "worker_id": worker.offer.worker_id,
        "run_id": made.run.run_id,
        "devices": made.run.needs.devices_each,
        "starts_at": forecast.now + timedelta(seconds=min(made.start, _MOST_SECONDS)) if known else None,
        "spare": made.spare,
        "durations": json.dumps(durations),
    }
