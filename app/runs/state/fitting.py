"""SQL conditions under which a device may train a pending run; `app.runs.queue.fit` states them in Python."""

from typing import Any

from sqlalchemy import (
    CTE,
    ColumnElement,
    Double,
    Integer,
    Text,
    and_,
    case,
    cast,
    exists,
    func,
    literal,
    or_,
    select,
    text,
    true,
    tuple_,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from app.infra.db import seconds
from app.runs.state.queue_order import PENDING, used_by_owner_of
from app.tables.runs import Run
from app.tables.scheduling import RESERVATION_SECONDS, Reservation
from app.tables.workers import Device, Worker
from app.workers.queries import has_name

GPU_MEMORY_SECONDS = 3600.0
"""Seconds after its last heartbeat for which a worker with a GPU keeps runs that prefer a GPU away from CPUs."""

_runs: Any = Run.__table__
_workers: Any = Worker.__table__
_devices: Any = Device.__table__
reservations: Any = Reservation.__table__


def allows_kind(kind: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that a run may train on this kind of device."""
    wanted = _runs.c.requirements["kind"].astext
    other, owner = _devices.alias("gpus"), _workers.alias("gpu_workers")
    has_gpu = exists(
        select(literal(1))
        .select_from(other.join(owner, owner.c.id == other.c.worker_id))
        .where(
            other.c.kind == "cuda",
            or_(
                owner.c.state != "offline",
                owner.c.heartbeat_at > func.clock_timestamp() - seconds(GPU_MEMORY_SECONDS),
            ),
            _runs.c.backend == func.any(owner.c.backends),
        )
    )
    prefers_gpu = _runs.c.requirements["prefers_gpu"].astext.is_not_distinct_from("true")
    free_choice = or_(kind == "cuda", ~and_(prefers_gpu, has_gpu))
    return case((wanted.is_not(None), wanted == kind), else_=free_choice)


def allows_labels(labels: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that a worker with these labels (an array of text) has all that a run asks for."""
    wanted = _runs.c.requirements["labels"]
    return case((wanted.is_not(None), cast(func.to_jsonb(labels), JSONB).contains(wanted)), else_=true())


def allows_gguf(writes_gguf: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a worker can write the GGUF file that a run asks for."""
    return case((_runs.c.requirements["gguf"].is_not(None), writes_gguf), else_=true())


def text_array(values: list[str]) -> ColumnElement[Any]:
    """Return texts as an SQL array."""
    return cast(literal(values, ARRAY(Text)), ARRAY(Text))


def fits_device(requirements: ColumnElement[Any], device: Any) -> ColumnElement[bool]:
    """Return the condition that a device is large enough for a run, and is the GPU that the run asks for.

    `device` has the columns `kind`, `name` and `memory_mb`.
    """
    estimated = func.jsonb_extract_path_text(requirements, "estimated_mb", device.kind)
    asked = func.jsonb_extract_path_text(requirements, "memory_mb")
    is_large = func.coalesce(cast(asked, Integer), cast(estimated, Integer), 0) <= func.coalesce(device.memory_mb, 0)
    return and_(is_large, has_name(func.jsonb_extract_path_text(requirements, "gpu"), device.name))


def _reserved() -> CTE:
    """Return the reservations that count: those of runs that still wait, renewed lately."""
    wide = _runs.alias("wide")
    return (
        select(reservations, wide.c.priority, used_by_owner_of(wide).label("used"))
        .join(wide, wide.c.id == reservations.c.run_id)
        .where(
            wide.c.status == PENDING,
            reservations.c.made_at > func.clock_timestamp() - seconds(RESERVATION_SECONDS),
        )
        .cte("reserved")
    )


def respects_reservation(worker_id: str, owners: CTE) -> ColumnElement[bool]:
    """Return the condition that a run may start on a worker although it is reserved for another run.

    It precedes that run in the queue, or leaves it enough devices, or is predicted to end before it can start. The
    enclosing query joins `owners` (`ranked_owners`).
    """
    reserved = _reserved()
    place = tuple_(-_runs.c.priority, owners.c.used, _runs.c.id)
    precedes = place < tuple_(-reserved.c.priority, reserved.c.used, reserved.c.run_id)
    duration = cast(func.jsonb_extract_path_text(reserved.c.durations, _runs.c.id), Double)
    ends_in_time = func.clock_timestamp() + duration * text("interval '1 s'") <= reserved.c.starts_at
    hindered = (
        select(literal(1))
        .where(
            reserved.c.worker_id == worker_id,
            reserved.c.run_id != _runs.c.id,
            ~precedes,
            _runs.c.devices_needed > reserved.c.spare,
            ~func.coalesce(ends_in_time, False),
        )
        .correlate(_runs, owners)
    )
    is_reserved = exists(select(literal(1)).select_from(reserved).where(reserved.c.worker_id == worker_id))
    return case((is_reserved, ~exists(hindered)), else_=true())


def has_free_device() -> ColumnElement[bool]:
    """Return the condition that an online worker has a free device which fits a run and is not kept for another one."""
    reserved = _reserved()
    kept = exists(
        select(literal(1)).select_from(reserved).where(reserved.c.worker_id == _workers.c.id, reserved.c.spare == 0)
    )
    # Alike devices count once, since this is compared with each run of the queue.
    free = (
        select(
            _workers.c.backends,
            _workers.c.labels,
            _workers.c.gguf,
            _devices.c.kind,
            _devices.c.name,
            func.max(_devices.c.memory_mb).label("memory_mb"),
        )
        .select_from(_devices.join(_workers, _workers.c.id == _devices.c.worker_id))
        .where(
            _workers.c.state == "online",
            _devices.c.run_id.is_(None),
            or_(_devices.c.paused_until.is_(None), _devices.c.paused_until <= func.clock_timestamp()),
            ~kept,
        )
        .group_by(_workers.c.backends, _workers.c.labels, _workers.c.gguf, _devices.c.kind, _devices.c.name)
        .cte("free")
    )
    fitting = select(literal(1)).where(
        _runs.c.backend == func.any(free.c.backends),
        allows_kind(free.c.kind),
        allows_labels(free.c.labels),
        allows_gguf(free.c.gguf),
        fits_device(_runs.c.requirements, free.c),
    )
    # The first condition does not depend on the run: Postgres checks it once, and with all devices busy nothing else.
    # A run on several hosts starts only where it is reserved.
    fits = and_(_runs.c.hosts_needed == 1, exists(select(literal(1)).select_from(free)), exists(fitting))
    is_due = and_(reserved.c.run_id == _runs.c.id, reserved.c.starts_at <= func.clock_timestamp())
    return or_(fits, exists(select(literal(1)).select_from(reserved).where(is_due)))
