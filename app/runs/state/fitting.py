"""SQL conditions under which a device may train a pending run; `app.runs.scheduler.placement` states them in Python."""

from typing import Any

from sqlalchemy import ColumnElement, Integer, Text, and_, case, cast, exists, func, literal, or_, select, true
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from app.infra.db import seconds
from app.tables.runs import Run
from app.tables.workers import Device, Worker

GPU_MEMORY_SECONDS = 3600.0
"""Seconds after its last heartbeat for which a worker with a GPU keeps runs that prefer a GPU away from CPUs."""

_runs: Any = Run.__table__
_workers: Any = Worker.__table__
_devices: Any = Device.__table__


def allows_kind(kind: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that a run may train on this kind of device."""
    wanted = _runs.c.requirements["kind"].astext
    other, owner = _devices.alias("gpus"), _workers.alias("gpu_workers")
    has_gpu = exists(
        select(literal(1))
        .select_from(other.join(owner, owner.c.id == other.c.worker_id))
        .where(
            other.c.kind == "cuda",
            owner.c.heartbeat_at > func.clock_timestamp() - seconds(GPU_MEMORY_SECONDS),
            _runs.c.backend == func.any(owner.c.backends),
        )
    )
    prefers_gpu = _runs.c.requirements["prefers_gpu"].astext.is_not_distinct_from("true")
    free_choice = or_(kind == "cuda", ~and_(prefers_gpu, has_gpu))
    # A CASE, here and below: Postgres takes it to be true for half of the runs, and so reads the queue in its order
    # until one fits. It would take the bare conditions to be true for none, and read and sort the whole queue.
    return case((wanted.is_not(None), wanted == kind), else_=free_choice)


def allows_labels(labels: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that a worker with these labels (an array of text) has all that a run asks for."""
    wanted = _runs.c.requirements["labels"]
    return case((wanted.is_not(None), cast(func.to_jsonb(labels), JSONB).contains(wanted)), else_=true())


def allows_gguf(writes_gguf: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a worker can write the GGUF file that a run asks for."""
    return case((_runs.c.requirements["gguf"].is_not(None), writes_gguf), else_=true())


def label_array(labels: list[str]) -> ColumnElement[Any]:
    """Return labels as an SQL array."""
    return cast(literal(labels, ARRAY(Text)), ARRAY(Text))


def has_memory(requirements: ColumnElement[Any], kind: ColumnElement[Any], memory_mb: Any) -> ColumnElement[bool]:
    """Return the condition that a device of this kind and memory is large enough for a run."""
    estimated = func.jsonb_extract_path_text(requirements, "estimated_mb", kind)
    asked = func.jsonb_extract_path_text(requirements, "memory_mb")
    return func.coalesce(cast(asked, Integer), cast(estimated, Integer), 0) <= func.coalesce(memory_mb, 0)


def has_free_device() -> ColumnElement[bool]:
    """Return the condition that an online worker has a free device which fits a run."""
    # Alike devices count once, since this is compared with each run of the queue.
    free = (
        select(
            _workers.c.backends,
            _workers.c.labels,
            _workers.c.gguf,
            _devices.c.kind,
            func.max(_devices.c.memory_mb).label("memory_mb"),
        )
        .select_from(_devices.join(_workers, _workers.c.id == _devices.c.worker_id))
        .where(
            _workers.c.state == "online",
            _devices.c.run_id.is_(None),
            or_(_devices.c.paused_until.is_(None), _devices.c.paused_until <= func.clock_timestamp()),
        )
        .group_by(_workers.c.backends, _workers.c.labels, _workers.c.gguf, _devices.c.kind)
        .cte("free")
    )
    fitting = select(literal(1)).where(
        _runs.c.backend == func.any(free.c.backends),
        allows_kind(free.c.kind),
        allows_labels(free.c.labels),
        allows_gguf(free.c.gguf),
        has_memory(_runs.c.requirements, free.c.kind, free.c.memory_mb),
    )
    # The first condition does not depend on the run: Postgres checks it once, and with all devices busy nothing else.
    return and_(exists(select(literal(1)).select_from(free)), exists(fitting))
