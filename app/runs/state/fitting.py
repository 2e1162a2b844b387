"""SQL conditions under which a device may train a pending run; `app.runs.scheduler.placement` states them in Python."""

from typing import Any

from sqlalchemy import ColumnElement, Integer, Text, and_, cast, exists, func, literal, or_, select, text
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
    return or_(wanted == kind, and_(wanted.is_(None), free_choice))


def allows_labels(labels: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that a worker with these labels (an array of text) has all that a run asks for."""
    wanted = func.coalesce(_runs.c.requirements["labels"], text("'[]'::jsonb"))
    return cast(func.to_jsonb(labels), JSONB).contains(wanted)


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
    free = (
        select(literal(1))
        .select_from(_devices.join(_workers, _workers.c.id == _devices.c.worker_id))
        .where(
            _workers.c.state == "online",
            _devices.c.run_id.is_(None),
            or_(_devices.c.paused_until.is_(None), _devices.c.paused_until <= func.clock_timestamp()),
        )
    )
    fitting = free.where(
        _runs.c.backend == func.any(_workers.c.backends),
        allows_kind(_devices.c.kind),
        allows_labels(_workers.c.labels),
        has_memory(_runs.c.requirements, _devices.c.kind, _devices.c.memory_mb),
    )
    # The first condition does not depend on the run: Postgres checks it once, and with all devices busy nothing else.
    return and_(exists(free), exists(fitting))
