"""Checks of the devices of this worker, before a run is claimed and before a part of one is started."""

import logging
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from app.infra.db import is_away
from app.workers import registry
from worker import devices
from worker.context import WorkerContext
from worker.devices import Device
from worker.health import UNUSABLE_PAUSE_SECONDS

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


def wait_for_devices(context: WorkerContext) -> None:
    """Wait until GPUs are checked, or the worker is to end."""
    while context.kind == "cuda" and not context.closing.is_set():
        if context.launcher.wait_checked(_LOOK_SECONDS):
            break


def check_devices_repeatedly(context: WorkerContext, note_health: Callable[[str | None], None]) -> None:
    """Check again and again what is checked before a claim, since other workers claim the devices of this one too.

    For a thread of its own: a check of shared storage may hang. `note_health` gets the reason why no run is taken.
    """
    wait_for_devices(context)
    while not context.closing.is_set():
        try:
            pause_unusable_devices(context)
            note_health(context.health.unhealthy_reason())
        except Exception:  # without this thread other workers would claim nothing here again
            log.exception("the check of this worker failed")
        context.closing.wait(context.settings.renew_seconds)


def pause_unusable_devices(context: WorkerContext) -> None:
    """Pause the idle GPUs on which a run would fail; resume those that are usable again.

    While the database is unavailable nothing changes, and nothing is claimed either.
    """
    reasons = {device.index: unusable_reason(context, device) for device in context.machine.devices}
    unusable = context.health.unusable
    if not unusable and not any(reasons.values()):
        return
    usable_again = {index for index in unusable if reasons.get(index) is None}
    paused = set()
    try:
        with context.engine.begin() as connection:
            for index, why in reasons.items():
                if index in usable_again:
                    connection.execute(registry.resume_device(context.id, index))
                elif why is not None:
                    statement = registry.pause_idle_device(context.id, index, why, UNUSABLE_PAUSE_SECONDS)
                    if connection.scalar(statement) is not None:
                        paused.add(index)
    except SQLAlchemyError as error:
        if not is_away(error):
            raise
        return
    for index in paused - unusable:
        log.warning("device %d takes no run: %s", index, reasons[index])
    unusable -= usable_again
    unusable |= paused


def unusable_reason(context: WorkerContext, device: Device) -> str | None:
    """Return a sentence about what would fail a run on an idle device; None if nothing is known."""
    broken = context.launcher.broken.get(device.id)
    if broken is not None:
        return f"a training step failed on it when the worker started, and is tried again when it restarts: {broken}"
    return context.health.survivors_reason(device.index) or devices.occupation_reason(device)
