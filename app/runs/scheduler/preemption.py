"""Preemption: runs of lower priority save and return to the queue, so that a run that waits too long can start."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.config import Settings
from app.contracts.backends import WORKER_BACKENDS
from app.contracts.run_status import LIVE
from app.runs.queue.fit import Fleet, Needs, RunningRun, WorkerOffer
from app.runs.queue.policy import MOST_HOLDS
from app.runs.scheduler.fleet import read_fleet
from app.runs.state import machine
from app.runs.state.queue_order import KEPT_FOR, OWNER, OWNERS, WITH_ROOM
from app.tables.base import sql_list

_MOST_HEADS = 20
# Neither a run that waits for devices which others are giving up already, nor one that no worker could train or claim:
# a worker of a cluster is started for one run. Those of each owner are read by an index, in the order of claims; the
# CASE keeps Postgres from expecting that none fits, and from sorting all of them.
_HEADS = text(f"""
    {WITH_ROOM}
    SELECT runs.* FROM owners CROSS JOIN LATERAL (
        SELECT runs.id, runs.priority, runs.backend, runs.devices_needed, runs.hosts_needed, runs.requirements,
            owners.used
        FROM runs
        WHERE {OWNER} = owners.owner AND runs.status = 'pending' AND CASE WHEN
            runs.backend IN {sql_list(WORKER_BACKENDS)}
            AND coalesce(runs.pending_reason ->> 'code', 'reserved') = 'reserved'
            AND greatest(runs.created_at, runs.not_before) < clock_timestamp() - make_interval(secs => :after)
            AND runs.devices_needed <= coalesce(least(
                owners.room, (SELECT room FROM limited WHERE limited.id = runs.experiment_id)), runs.devices_needed)
            AND NOT runs.id = ANY(ARRAY(
                SELECT preempted_for FROM runs AS others
                WHERE others.status IN {sql_list(LIVE)} AND others.preempted_for IS NOT NULL))
            AND {KEPT_FOR} IS NULL
        THEN true ELSE false END
        ORDER BY runs.priority DESC, runs.id LIMIT {_MOST_HEADS}
    ) AS runs ORDER BY runs.priority DESC, runs.used, runs.id LIMIT {_MOST_HEADS}
""")
# Other tasks have no checkpoints, and a run that has made no step yet would only lose the time for loading its model.
_TRAINING = text(f"""
    SELECT runs.id, runs.priority, {OWNER}, runs.devices_needed,
        cast(extract(epoch FROM clock_timestamp() - attempts.started_at) AS float) AS seconds
    FROM runs JOIN run_attempts AS attempts ON attempts.run_id = runs.id AND attempts.attempt = runs.attempt
    WHERE runs.status IN {sql_list(LIVE)} AND runs.stop_requested_at IS NULL AND runs.preempted_for IS NULL
        AND runs.task = 'train' AND runs.current_step > attempts.start_step
""")
_RESERVED = text(f"""
    WITH owners AS ({OWNERS})
    SELECT reservations.worker_id, reservations.run_id, runs.priority, owners.used
    FROM reservations JOIN runs ON runs.id = reservations.run_id JOIN owners ON owners.owner = {OWNER}
    WHERE runs.status = 'pending'
""")
_RELEASE = text("DELETE FROM reservations WHERE run_id = :run_id")
_RESERVE = text("""
    INSERT INTO reservations (worker_id, run_id, devices, spare) VALUES (:worker_id, :run_id, :devices, 0)
    ON CONFLICT (worker_id) DO UPDATE SET run_id = excluded.run_id, devices = excluded.devices, starts_at = NULL,
        spare = 0, durations = '{}', made_at = clock_timestamp()
""")


@dataclass(frozen=True)
class Room:
    """Workers on which a run can start once other runs have left them: one for each host that it needs."""

    worker_ids: list[str]
    victims: list[str]


def choose_room(
    needs: Needs, priority: int, fleet: Fleet, training: Mapping[str, RunningRun], least_seconds: float
) -> Room | None:
    """Return runs of lower priority whose devices, with those that are free, are enough for a run.

    None if the run fits free devices, or if too few workers that are alike (`WorkerOffer.alike`) would have enough. Of
    several workers it is those on which the fewest devices are given up, then the least training since the last start.
    """
    options: dict[tuple[str, str], list[tuple[tuple[int, float], str, list[str]]]] = defaultdict(list)
    for worker in fleet.workers:
        if not needs.allows_worker(worker, fleet.gpu_backends):
            continue
        held, missing = _held_devices(needs, worker)
        victims = [
            training[run_id]
            for run_id in held
            if run_id in training and training[run_id].priority < priority and training[run_id].seconds >= least_seconds
        ]
        chosen = _fewest(victims, held, missing) if missing > 0 else []
        if chosen or missing <= 0:
            key = (sum(held[one.run_id] for one in chosen), sum(one.seconds for one in chosen))
            options[worker.alike].append((key, worker.worker_id, [one.run_id for one in chosen]))
    groups = [sorted(group)[: needs.hosts] for group in options.values() if len(group) >= needs.hosts]
    if not groups:
        return None
    best = min(groups, key=lambda group: group[-1][0])
    victims_of_all = list(dict.fromkeys(run_id for _, _, given_up in best for run_id in given_up))
    if not victims_of_all:
        return None
    return Room([worker_id for _, worker_id, _ in best], victims_of_all)


def _held_devices(needs: Needs, worker: WorkerOffer) -> tuple[dict[str, int], float]:
    """Return the number of fitting devices of each run on a worker, and how many the new run lacks."""
    fitting = [one for one in worker.devices if needs.fits(worker.kind, one) and not one.paused]
    if len(fitting) < needs.devices_each:
        return {}, math.inf
    held: dict[str, int] = {}
    for one in fitting:
        if one.run_id is not None:
            held[one.run_id] = held.get(one.run_id, 0) + 1
    return held, needs.devices_each - sum(one.run_id is None for one in fitting)


def _fewest(victims: Sequence[RunningRun], held: Mapping[str, int], missing: float) -> list[RunningRun]:
    """Return victims with enough devices, lowest priority and shortest training first; none if all are not enough."""
    chosen: list[RunningRun] = []
    for one in sorted(victims, key=lambda one: (one.priority, one.seconds)):
        if sum(held[other.run_id] for other in chosen) >= missing:
            break
        chosen.append(one)
    freed = sum(held[one.run_id] for one in chosen)
    if freed < missing:
        return []
    for one in list(chosen):  # those that a later, wider one has made superfluous
        if freed - held[one.run_id] >= missing:
            chosen.remove(one)
            freed -= held[one.run_id]
    return chosen


async def preempt(connection: AsyncConnection, settings: Settings) -> list[str]:
    """Ask runs to make room for the first one that has waited too long; return the asked ones."""
    if settings.preempt_after_seconds is None:
        return []
    heads = (await connection.execute(_HEADS, {"after": settings.preempt_after_seconds})).all()
    if not heads:
        return []
    training = {row.id: RunningRun(*row) for row in (await connection.execute(_TRAINING)).all()}
    fleet = await read_fleet(connection, settings.lease_seconds)
    reserved = {row.worker_id: row for row in (await connection.execute(_RESERVED)).all()}
    for head in heads:
        # The next round of reservations would drop that of a run beyond those that may have one, and its room be lost.
        others = {kept.run_id for kept in reserved.values()} - {head.id}
        if head.devices_needed > 1 and len(others) >= MOST_HOLDS:
            continue
        needs = Needs.of(head.backend, head.devices_needed, head.hosts_needed, head.requirements)
        # On a worker that is kept for a run before it, it could not start.
        open_to_it = [
            worker
            for worker in fleet.workers
            if (kept := reserved.get(worker.worker_id)) is None
            or (-head.priority, head.used, head.id) <= (-kept.priority, kept.used, kept.run_id)
        ]
        there = Fleet(open_to_it, fleet.gpu_backends)
        room = choose_room(needs, head.priority, there, training, settings.preempt_min_seconds)
        if room is not None:
            asked = (await connection.execute(machine.preempt(room.victims, head.id))).all()
            if head.devices_needed > 1:
                values = {"run_id": head.id, "devices": needs.devices_each}
                await connection.execute(_RELEASE, {"run_id": head.id})
                await connection.execute(_RESERVE, [{"worker_id": one, **values} for one in room.worker_ids])
            # The devices that become free are for this run; the next one is looked at when it has started.
            return [row.id for row in asked]
    return []
