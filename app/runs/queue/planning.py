"""Plan of the queue, once a round: who is to make room, what runs hold, and why runs wait."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from anneal.contracts.schemas.runs.placement import PendingReason
from app.config import Settings
from app.infra import async_tasks
from app.runs.queue.fit import Needs, kept_quota_reason, pause_reason, pending_reason, reason_of_quota, reserved_reason
from app.runs.queue.holds import StoredHolds
from app.runs.queue.holds_table import store_holds
from app.runs.queue.policy import Assignment, Hold, Plan, Snapshot, quota_holder, schedule
from app.runs.queue.preemption import preempt_for_first
from app.runs.queue.snapshot import Forecast, read_forecast
from app.runs.state import machine

log = logging.getLogger(__name__)

_REASON_AFTER_SECONDS = 5.0
"""Seconds that a run waits without a reason: a worker that restarts is back within these, and usually takes it."""


@dataclass(frozen=True)
class PlannedQueue:
    """Queue of a round and its plan."""

    forecast: Forecast
    snapshot: Snapshot
    plan: Plan
    preempted: list[str]
    """Runs that were asked to make room."""

    def startable_runs(self) -> list[str]:
        """Return the runs that could start now."""
        return [assignment.run.run_id for assignment in self.plan.assignments]


async def plan_queue(
    connection: AsyncConnection, settings: Settings, backends: Sequence[str], *, may_preempt: bool = True
) -> PlannedQueue | None:
    """Plan the queue, ask runs to make room, and store what runs hold until the next plan; None if no run waits."""
    forecast = await read_forecast(connection, settings, backends, is_round=True)
    if forecast is None or not forecast.pending:
        await connection.run_sync(store_holds, StoredHolds())
        return None
    # In a thread: a thousand runs and hundreds of workers take tenths of a second.
    snapshot, plan = await asyncio.to_thread(_plan, forecast)
    preempted: list[str] = []
    may_preempt = may_preempt and forecast.fleet.pause is None
    request = preempt_for_first(forecast, snapshot, plan, settings) if may_preempt else None
    if request is not None:
        run, room = request
        rows = (await connection.execute(machine.preempt(room.victims, run.run_id))).all()
        preempted = [row.id for row in rows]
        forecast.expect_room(run.run_id, room.worker_ids, preempted)
        snapshot, plan = await asyncio.to_thread(_plan, forecast)
    holds = await asyncio.to_thread(StoredHolds.of_plan, plan, snapshot, forecast.now.timestamp())
    await connection.run_sync(store_holds, holds)
    return PlannedQueue(forecast, snapshot, plan, preempted)


def _plan(forecast: Forecast) -> tuple[Snapshot, Plan]:
    snapshot = forecast.snapshot()
    return snapshot, schedule(snapshot)


def changed_reasons(planned: PlannedQueue) -> list[tuple[str, PendingReason | None]]:
    """Return the ids of the runs whose reason to wait has changed, each with its present reason."""
    pause = planned.snapshot.fleet.pause
    hosts = {worker.worker_id: worker.host for worker in planned.snapshot.fleet.workers}
    holds: dict[str, Hold | Assignment] = {hold.run.run_id: hold for hold in planned.plan.holds}
    holds |= {
        assignment.run.run_id: assignment for assignment in planned.plan.assignments if assignment.run.needs.hosts > 1
    }
    by_needs: dict[Needs, PendingReason | None] = {}
    changed = []
    for run in planned.snapshot.waiting:
        row = planned.forecast.pending[run.run_id]
        if row.wait > -_REASON_AFTER_SECONDS:
            continue
        with async_tasks.skipping_errors(log, "cannot say why run %s is pending", run.run_id):
            reason = reason_of_quota(row) if pause is None else pause_reason(pause)
            if reason is None:
                if run.needs not in by_needs:  # many runs of a long queue need the same
                    by_needs[run.needs] = pending_reason(run.needs, planned.snapshot.fleet)
                reason = by_needs[run.needs]
            if reason is None and (holder := quota_holder(run, planned.snapshot, planned.plan)) is not None:
                reason = kept_quota_reason(holder)
            if reason is None and (hold := holds.get(run.run_id)) is not None:
                reason = reserved_reason(run.needs, sorted((hosts[worker_id], worker_id) for worker_id in hold.devices))
            if (reason and reason.model_dump()) != row.pending_reason:
                changed.append((run.run_id, reason))
    return changed
