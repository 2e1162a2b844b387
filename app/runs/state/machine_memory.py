"""SQL for the memory of a machine whose workers each offer all of it: what runs of the others need is not free.

Only CPUs are concerned: a GPU has a memory of its own, and belongs to one worker.
"""

from typing import Any

from sqlalchemy import ColumnElement, Executable, Integer, cast, exists, func, literal, or_, select

from app.tables.runs import Run
from app.tables.workers import Device, Worker

_KEY = 0x6D656D  # "mem"
_runs: Any = Run.__table__
_devices: Any = Device.__table__
_workers: Any = Worker.__table__


def _boot_id(worker: Any) -> ColumnElement[str]:
    """Return what the workers of a machine share: those in containers have other host names and process ids."""
    return func.split_part(worker.boot_id, "/", 1)


def lock_memory(worker_id: str) -> Executable:
    """Let the claims of several workers of one machine take turns: each must see what those before it have taken."""
    own, other = _workers.alias("own"), _workers.alias("other")
    has_cpus = exists().where(_devices.c.worker_id == own.c.id, _devices.c.kind == "cpu")
    is_shared = exists().where(other.c.id != own.c.id, other.c.state != "offline", _boot_id(other.c) == _boot_id(own.c))
    return select(func.pg_advisory_xact_lock(literal(_KEY, Integer), func.hashtext(_boot_id(own.c)))).where(
        own.c.id == worker_id, has_cpus, is_shared
    )


def _needed_mb(requirements: ColumnElement[Any]) -> ColumnElement[int]:
    """Return the memory of a run on each of its devices, of which 0 is known if it has no estimate."""
    requested = func.jsonb_extract_path_text(requirements, "memory_mb")
    estimated = func.jsonb_extract_path_text(requirements, "estimated_mb", "cpu")
    return func.coalesce(cast(requested, Integer), cast(estimated, Integer), 0)


def fits_beside_others(worker_id: str) -> ColumnElement[bool]:
    """Return the condition that a run fits a machine beside the runs that its workers train already.

    Without runs of other workers it is true: then the devices of this worker, which divide the machine's memory among
    them, decide alone.
    """
    own, holders = _workers.alias("own"), _runs.alias("holders")
    held = (
        _devices.join(_workers, _workers.c.id == _devices.c.worker_id)
        .join(own, _boot_id(own.c) == _boot_id(_workers.c))
        .join(holders, holders.c.id == _devices.c.run_id)
    )
    of_machine = (own.c.id == worker_id, _devices.c.kind == "cpu")
    used_mb = select(func.sum(_needed_mb(holders.c.requirements))).select_from(held).where(*of_machine)
    others = select(literal(1)).select_from(held).where(*of_machine, _workers.c.id != worker_id)
    offered = _devices.alias("offered")
    machine_mb = select(func.sum(offered.c.memory_mb)).where(offered.c.worker_id == worker_id)
    needed_mb = _needed_mb(_runs.c.requirements) * _runs.c.devices_needed
    return or_(~exists(others), used_mb.scalar_subquery() + needed_mb <= machine_mb.scalar_subquery())
