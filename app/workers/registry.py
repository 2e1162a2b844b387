"""Statements with which a worker registers itself and its devices."""

from typing import Any

from sqlalchemy import Executable, Update, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert

from app.infra.db import interval_seconds
from app.tables.workers import Device, Worker


def register_worker(values: dict[str, Any]) -> Executable:
    """Insert the worker's row; insert it again if retention or an operator has removed it."""
    return (
        insert(Worker)
        .values(**values, state="online")
        .on_conflict_do_update(index_elements=["id"], set_={"heartbeat_at": func.clock_timestamp()})
    )


def register_devices(devices: list[dict[str, Any]]) -> Executable:
    """Insert the devices of a worker; existing rows keep their run."""
    return insert(Device).values(devices).on_conflict_do_nothing()


def pause_device(worker_id: str, index: int, trouble: str, pause_seconds: float) -> Update:
    """Let a device take no run for a while."""
    until = func.clock_timestamp() + interval_seconds(pause_seconds)
    return _update_device(worker_id, index).values(trouble=trouble, paused_until=until)


def pause_idle_device(worker_id: str, index: int, trouble: str, pause_seconds: float) -> Executable:
    """Let a device without a run take none for a while; returns no row if it has one."""
    paused = pause_device(worker_id, index, trouble, pause_seconds)
    return paused.where(Device.run_id.is_(None)).returning(Device.index)


def resume_device(worker_id: str, index: int) -> Executable:
    """Record that a device works again."""
    return _update_device(worker_id, index).values(trouble=None, paused_until=None)


def store_telemetry(worker_id: str, index: int, telemetry: dict[str, Any]) -> Executable:
    """Store the newest telemetry of a device, with its time."""
    return _update_device(worker_id, index).values(telemetry=telemetry)


def _update_device(worker_id: str, index: int) -> Update:
    return update(Device).where(Device.worker_id == worker_id, Device.index == index)


def record_heartbeat(
    worker_id: str, state: str, launch_mode: str, launch_reason: str, group_address: str | None = None
) -> Executable:
    """Record a heartbeat; returns no row if the worker is not (or no longer) registered.

    `group_address`: see `Worker`; None while it should get no part of a run.
    """
    return (
        update(Worker)
        .where(Worker.id == worker_id)
        .values(
            heartbeat_at=func.clock_timestamp(),
            state=state,
            launch_mode=launch_mode,
            launch_reason=launch_reason,
            group_address=group_address,
        )
        .returning(Worker.id)
    )


def on_host(host: str) -> Executable:
    """Select the workers of a host that are not offline: id, pid, boot id, process start."""
    return select(Worker.id, Worker.pid, Worker.boot_id, Worker.process_started).where(
        Worker.host == host, Worker.state != "offline"
    )


def mark_offline(worker_ids: list[str]) -> Executable:
    """Mark workers as offline."""
    return update(Worker).where(Worker.id.in_(worker_ids)).values(state="offline")


def delete_old(older_than_days: int) -> Executable:
    """Delete workers that ended long ago; their runs keep the worker id."""
    old = func.clock_timestamp() - func.make_interval(0, 0, 0, older_than_days)
    return delete(Worker).where(Worker.state == "offline", Worker.heartbeat_at < old)
