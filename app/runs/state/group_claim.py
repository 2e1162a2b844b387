"""Claim of a run on several hosts: one statement takes its devices on all of them, or none.

As the transitions of `machine.py`, it is guarded, and writes the events with it.
"""

from sqlalchemy import Executable, exists, func, or_, select, update
from sqlalchemy.dialects.postgresql import aggregate_order_by, insert
from sqlalchemy.orm import aliased

from app.infra.db import seconds
from app.runs.state.fitting import fits_device, reservations, text_array
from app.runs.state.queue_order import PENDING, has_room, is_owned_by, owner_of_reserved
from app.runs.state.transitions import claimed, devices, extra_eval_datasets, run_parts, runs
from app.tables.scheduling import RESERVATION_SECONDS
from app.tables.workers import Worker

LATELY = 0.5
"""Fraction of a lease in which a worker must have sent a heartbeat, of which there are six, to get a part of a run."""


def is_reserved_with_others(worker_id: str) -> Executable:
    """Return whether a worker is reserved for a run on several hosts; without that it claims none."""
    return select(
        exists()
        .where(reservations.c.worker_id == worker_id, runs.c.id == reservations.c.run_id)
        .where(runs.c.hosts_needed > 1)
    )


def claim_with_others(worker_id: str, backends: list[str], lease_seconds: float) -> Executable:
    """Claim the run for which this worker and others are reserved, with its devices on each of them, or nothing.

    This worker is the lead: it gets rank 0 and owns the run. The others get a part each, whose lease begins now.
    `device_indexes` of the row are its own, `members` the ids of the others. No attempt starts before all parts of an
    earlier one have ended. Execute `lock_for_claim` first, and in a transaction in which no device is locked: those of
    all workers are locked in one order. The reservations of a run that has started count no more; the
    dispatcher, which alone writes several of them, deletes them.
    """
    mine, lead = reservations.alias("mine"), aliased(Worker)
    owners = owner_of_reserved(worker_id)
    has_open_part = exists().where(
        run_parts.c.run_id == runs.c.id,
        run_parts.c.ended_at.is_(None),
    )
    reserved = select(func.count()).where(reservations.c.run_id == runs.c.id).scalar_subquery()
    wanted = (
        select(
            runs.c.id,
            runs.c.lease_epoch,
            runs.c.requirements,
            runs.c.devices_needed,
            (runs.c.devices_needed / runs.c.hosts_needed).label("devices_each"),
        )
        .join(mine, mine.c.run_id == runs.c.id)
        .join(owners, is_owned_by(owners.c.owner))
        .where(
            mine.c.worker_id == worker_id,
            runs.c.hosts_needed > 1,
            # A round that moves the run leaves it a worker with a claim in flight; the next round takes that back.
            runs.c.hosts_needed == reserved,
            runs.c.status == PENDING,
            runs.c.stop_requested_at.is_(None),
            runs.c.not_before <= func.clock_timestamp(),
            runs.c.backend == func.any(text_array(backends)),
            has_room(owners),
            ~has_open_part,
        )
        .cte("wanted")
    )
    free = (
        select(devices.c.worker_id, devices.c.index, devices.c.kind, devices.c.name, devices.c.memory_mb)
        .join(Worker, Worker.id == devices.c.worker_id)
        .where(
            devices.c.worker_id.in_(
                select(reservations.c.worker_id)
                .join(wanted, wanted.c.id == reservations.c.run_id)
                .where(reservations.c.made_at > func.clock_timestamp() - seconds(RESERVATION_SECONDS))
            ),
            devices.c.run_id.is_(None),
            or_(devices.c.paused_until.is_(None), devices.c.paused_until <= func.clock_timestamp()),
            Worker.state == "online",
            Worker.group_address.is_not(None),
            Worker.version == select(lead.version).where(lead.id == worker_id).scalar_subquery(),
            Worker.heartbeat_at > func.clock_timestamp() - seconds(lease_seconds * LATELY),
        )
        .order_by(devices.c.worker_id, devices.c.index)
        .with_for_update(of=devices)
        .cte("free")
    )
    fitting = (
        select(
            free.c.worker_id,
            free.c.index,
            func.row_number()
            .over(partition_by=free.c.worker_id, order_by=(free.c.memory_mb, free.c.index))
            .label("place"),
        )
        .join(wanted, fits_device(wanted.c.requirements, free.c))
        .cte("fitting")
    )
    chosen = (
        select(
            wanted.c.id.label("run_id"),
            fitting.c.worker_id,
            fitting.c.index,
            (func.dense_rank().over(order_by=(fitting.c.worker_id != worker_id, fitting.c.worker_id)) - 1).label(
                "part"
            ),
        )
        .join(wanted, fitting.c.place <= wanted.c.devices_each)
        .cte("chosen")
    )
    # As many workers are reserved as it needs, and none gives more than its share: all give it if the sum is right.
    is_whole = select(func.count()).select_from(chosen).scalar_subquery() == wanted.c.devices_needed
    candidate = runs.alias("candidate")
    picked = (
        select(candidate.c.id, candidate.c.status.label("from_status"))
        .join(wanted, wanted.c.id == candidate.c.id)
        .where(
            candidate.c.status == PENDING,
            candidate.c.stop_requested_at.is_(None),
            # While this statement waited for the devices, an attempt may have come and gone, whose parts still run.
            candidate.c.lease_epoch == wanted.c.lease_epoch,
            is_whole,
        )
        .with_for_update(of=candidate, key_share=True, skip_locked=True)
        .cte("picked")
    )
    moved, parts = claimed(picked, worker_id, lease_seconds)
    taken = (
        update(devices)
        .where(
            devices.c.worker_id == chosen.c.worker_id,
            devices.c.index == chosen.c.index,
            chosen.c.run_id == moved.c.id,
        )
        .values(run_id=moved.c.id, lease_epoch=moved.c.lease_epoch)
        .returning(devices.c.worker_id, devices.c.index, chosen.c.part)
        .cte("taken")
    )
    others = (
        select(
            moved.c.id,
            moved.c.lease_epoch,
            taken.c.part,
            taken.c.worker_id,
            taken.c.part * (moved.c.devices_needed / moved.c.hosts_needed),
            func.array_agg(aggregate_order_by(taken.c.index, taken.c.index)),
            moved.c.lease_expires_at,
        )
        .select_from(moved.join(taken, taken.c.part > 0))
        .group_by(
            moved.c.id,
            moved.c.lease_epoch,
            taken.c.part,
            taken.c.worker_id,
            moved.c.devices_needed,
            moved.c.hosts_needed,
            moved.c.lease_expires_at,
        )
    )
    columns = ["run_id", "lease_epoch", "part", "worker_id", "first_rank", "device_indexes", "lease_expires_at"]
    given = insert(run_parts).from_select(columns, others).returning(run_parts.c.worker_id).cte("given")
    own = select(func.array_agg(taken.c.index)).where(taken.c.part == 0).scalar_subquery().label("device_indexes")
    members = select(func.array_agg(given.c.worker_id)).scalar_subquery().label("members")
    return select(moved, own, members, extra_eval_datasets(moved)).add_cte(*parts)
