"""Stores the reservations of devices and quotas for the first runs of the queue that need several devices.

While a round computes them, claims go on. So it stores them under the locks that claims take, in their order, and
subtracts from the spare devices what was claimed meanwhile.
"""

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.config import Settings
from app.runs.queue.fit import WorkerOffer
from app.runs.queue.policy import Assignment, Hold, Snapshot, WaitingRun, schedule
from app.runs.scheduler.forecast import Forecast, read_forecast
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
    snapshot = forecast.snapshot()
    plan = schedule(snapshot)
    workers = {worker.worker_id: worker for worker in snapshot.fleet.workers}
    # A run on several hosts is claimed only where it is reserved, also if it can start now.
    starting = [_hold_of(one, workers) for one in plan.assignments if one.run.needs.hosts > 1]
    holds = [
        {
            "worker_id": worker_id,
            "run_id": hold.run.run_id,
            "devices": hold.run.needs.devices_each,
            "starts_at": _starts_at(forecast, hold.start),
            "spare": hold.spare(worker_id),
            "durations": json.dumps(_shorter_runs(snapshot, hold.run, hold.start, [workers[worker_id]])),
        }
        for hold in (*plan.holds, *starting)
        for worker_id in hold.devices
    ]
    quotas = [
        {
            "quota_id": quota_id,
            "run_id": hold.run.run_id,
            "starts_at": _starts_at(forecast, hold.start),
            "spare": hold.spare,
            "durations": json.dumps(_shorter_runs(snapshot, hold.run, hold.start, workers.values(), quota_id)),
        }
        for quota_id, hold in plan.quota_holds.items()
    ]
    return holds, quotas


def _hold_of(assignment: Assignment, workers: Mapping[str, WorkerOffer]) -> Hold:
    """Return what an assignment holds until it is claimed."""
    needs = assignment.run.needs
    free = {
        worker_id: frozenset(
            index
            for index, device in enumerate(workers[worker_id].devices)
            if device.run_id is None and not device.paused and needs.fits(workers[worker_id].kind, device)
        )
        for worker_id in assignment.devices
    }
    return Hold(assignment.run, 0.0, free)


def _shorter_runs(
    snapshot: Snapshot, holder: WaitingRun, start: float, workers: Iterable[WorkerOffer], quota_id: str | None = None
) -> dict[str, float]:
    """Return the durations of other runs, of a quota if one is given, that end before `start` on all these workers."""
    durations: dict[str, float] = {}
    if not 0 < start < math.inf:
        return durations
    for run in snapshot.waiting:
        if run.run_id == holder.run_id or (quota_id is not None and quota_id not in run.quotas):
            continue
        gpu_backends = snapshot.fleet.gpu_backends
        seconds = [snapshot.seconds(run, worker) for worker in workers if run.needs.allows_worker(worker, gpu_backends)]
        if seconds and max(seconds) < start:
            durations[run.run_id] = round(max(seconds), 1)
    return durations


def _starts_at(forecast: Forecast, start: float) -> datetime | None:
    return None if math.isinf(start) else forecast.now + timedelta(seconds=min(start, _MOST_SECONDS))
