"""Fetches a checkpoint that is missing or corrupt here from the object store, before an older one is used."""

import errno
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Engine

from app.config import Settings
from app.infra.files.object_store import StoreUnavailable
from app.infra.files.tree import bytes_below
from app.infra.storage import Storage
from app.runs.events.log import NewEvent
from app.runs.state.checkpoints import uploads
from worker.checkpoint_files.disk_space import DiskSpace
from worker.checkpoint_store.remote_store import (
    CorruptInStore,
    MissingInStore,
    RemoteStore,
    TransferCancelled,
)
from worker.checkpoint_store.working_copy import WorkingCopy
from worker.claimed_run import ClaimedRun

log = logging.getLogger(__name__)

_TRIES = 3
_TRIES_OF_CORRUPT = 2
_PAUSE_SECONDS = 1.0
_PROGRESS_SECONDS = 5.0
_NO_STORE = (
    "an object store has it, but ANNEAL_STORAGE of this worker is a folder: copy the checkpoint there, or set "
    "ANNEAL_STORAGE to the URL of that store (docs/operations/remote-checkpoints.md)"
)


class StoreContext(Protocol):
    """The part of a worker that removing and restoring checkpoints uses."""

    id: str
    settings: Settings
    storage: Storage
    engine: Engine
    draining: threading.Event
    working_copy: WorkingCopy | None


class RestoreOutcome(Enum):
    """Result of the attempt to restore a checkpoint that was missing or corrupt here."""

    WHOLE = "whole"
    """The checkpoint is here, complete and verified."""
    BAD = "bad"
    """Neither this storage nor the object store has what was written, so no run can ever resume from it."""
    AWAY = "away"
    """It cannot be reached now, but is probably intact."""
    ELSEWHERE = "elsewhere"
    """It is neither here nor usable in the object store; the worker that wrote it may still have it and resume from
    it later."""


@dataclass(frozen=True)
class RestoreResult:
    """Result of a restore and its explanation."""

    outcome: RestoreOutcome
    why: str = ""
    """Clause that says what was wrong here and in the object store; empty if nothing was."""
    is_refused: bool = False
    """True if the store refuses this worker."""


@dataclass(frozen=True)
class RestoreControl:
    """Control of a run that is being prepared: when to stop, and where to report progress."""

    should_end: Callable[[], bool]
    """Returns True if the run is to end or to be released."""
    report: Callable[[NewEvent], None]
    until: float = math.inf
    """Monotonic time at which the preparation must be complete."""

    def with_time_limit(self, seconds: float) -> "RestoreControl":
        """Return the control of a preparation that starts now and may take so long."""
        return replace(self, until=time.monotonic() + seconds)

    def raise_if_ended(self) -> None:
        """Raise `TransferCancelled` if the preparation is to end, TimeoutError if it takes too long."""
        if self.should_end():
            raise TransferCancelled("the run is to end or to be released")
        if time.monotonic() >= self.until:
            raise TimeoutError("its checkpoints could not be read in time; check the speed of ANNEAL_STORAGE")


def restore_checkpoint(
    context: StoreContext,
    run: ClaimedRun,
    checkpoint: Any,
    place: Path,
    problems: list[str],
    restore_control: RestoreControl,
) -> RestoreResult:
    """Replace what is damaged at `place` by what the object store has of `checkpoint`, for an attempt of `run`.

    Raises:
        TransferCancelled: The run is to end or to be released.
        OSError: This worker's own storage cannot take it or has no space for it.
    """
    is_missing = not place.exists()
    here = "it is not in this worker's storage" if is_missing else "; ".join(problems[:3])
    unusable = RestoreOutcome.ELSEWHERE if is_missing else RestoreOutcome.BAD
    if context.working_copy is None:
        if checkpoint.replicated_at is not None:
            return RestoreResult(RestoreOutcome.AWAY, f"{here}; {_NO_STORE}")
        return RestoreResult(RestoreOutcome.BAD, here)  # all workers share the folder
    if checkpoint.replicated_at is None:
        return RestoreResult(unusable, here)  # another machine had no time to send it
    remote = context.working_copy.remote
    try:
        _fetch_checkpoint(context, remote, run, checkpoint, place, restore_control)
    except CorruptInStore as error:
        # A worker that still has it intact must send it again.
        with context.engine.begin() as connection:
            connection.execute(uploads.mark_corrupt(checkpoint.id, checkpoint.replicated_at))
        return RestoreResult(unusable, f"{here}, and {error}")
    except MissingInStore:
        outcome = RestoreOutcome.AWAY if is_missing else RestoreOutcome.BAD
        return RestoreResult(outcome, f"{here}, and {remote.url} does not have it")
    except StoreUnavailable as error:
        why = f"{here}, and cannot be fetched from {remote.url} now: {error}"
        return RestoreResult(RestoreOutcome.AWAY, why, error.is_refused)
    return RestoreResult(RestoreOutcome.WHOLE, f"{here}; it was fetched from {remote.url}")


def _fetch_checkpoint(
    context: StoreContext,
    remote: RemoteStore,
    run: ClaimedRun,
    checkpoint: Any,
    place: Path,
    restore_control: RestoreControl,
) -> None:
    if context.working_copy is not None:
        context.working_copy.make_room(checkpoint.bytes)
    lacking = DiskSpace(context.storage.root, context.settings.disk_reserve_bytes).shortage_reason(checkpoint.bytes)
    if lacking:
        raise OSError(errno.ENOSPC, f"{checkpoint.name} does not fit on the disk: {lacking}")
    # Two runs that resume from one checkpoint may fetch it at the same time.
    own_name = f"{context.id}.{run.id}"
    staging = context.storage.fetch_dir(place, own_name)
    reported_at = -_PROGRESS_SECONDS

    def on_piece() -> None:
        nonlocal reported_at
        restore_control.raise_if_ended()
        if time.monotonic() - reported_at >= _PROGRESS_SECONDS:
            reported_at = time.monotonic()
            done = min(bytes_below(staging), checkpoint.bytes)
            message = f"fetching {checkpoint.name} from {remote.url}"
            progress = {"phase": "fetching", "done": done, "total": checkpoint.bytes, "message": message}
            restore_control.report(NewEvent.from_payload("progress", time.time(), progress))

    began = time.monotonic()
    for tries in range(1, _TRIES + 1):
        restore_control.raise_if_ended()
        try:
            remote.fetch_checkpoint(place, checkpoint.manifest_sha256, own_name, on_piece)
        except (StoreUnavailable, CorruptInStore) as error:
            log.warning("%s: %s, try %d: %s", checkpoint.run_id, checkpoint.name, tries, error)
            # Wrong bytes may have arrived of an intact checkpoint. Of a corrupt one, each fetch is large and useless.
            if tries >= (_TRIES_OF_CORRUPT if isinstance(error, CorruptInStore) else _TRIES):
                raise
            context.draining.wait(_PAUSE_SECONDS * tries)
        else:
            log.info("%s: %s fetched in %.1f s", checkpoint.run_id, checkpoint.name, time.monotonic() - began)
            return
