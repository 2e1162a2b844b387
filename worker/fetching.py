"""A checkpoint that is not here, or not whole: fetched from its second copy before an older one is taken."""

import errno
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from app.checkpoints import copies
from app.events.log import NewEvent
from worker.host import Host
from worker.remote import BadCopy, NotThere, Remote, Stopped, Unreachable
from worker.training.room import Room

log = logging.getLogger(__name__)

_TRIES = 3
_PAUSE_SECONDS = 1.0
_TELL_SECONDS = 5.0


class Outcome(Enum):
    """Where a checkpoint that was not whole here stands now."""

    WHOLE = "whole"
    """It is here, every byte of it."""
    BAD = "bad"
    """Neither here nor there is what was written: nobody will ever resume from it."""
    AWAY = "away"
    """It cannot be reached now, and there is a copy that probably is whole."""
    ELSEWHERE = "elsewhere"
    """Nothing of it is here and no copy is of use; the worker that wrote it may have it, and go on from it one day."""


@dataclass(frozen=True)
class Fetched:
    """What came of it."""

    outcome: Outcome
    why: str
    """In a part of a sentence: what was wrong here, and what came of the copy."""


@dataclass(frozen=True)
class Patience:
    """Of a run that is being prepared: how long it may take, and who hears of it."""

    should_end: Callable[[], bool]
    """Whether the run is to end, or to be given back."""
    tell: Callable[[NewEvent], None]

    def check(self) -> None:
        """Raises `Stopped` once it should end."""
        if self.should_end():
            raise Stopped("the run is to end, or to be given back")


def instead(host: Host, run: Any, checkpoint: Any, place: Path, wrong: list[str], patience: Patience) -> Fetched:
    """Have the copy of `checkpoint` take the place of what is `wrong` there, for an attempt of `run`.

    Raises:
        Stopped: meanwhile the run was to end.
        OSError: this worker's own storage cannot take it, or has no room for it.
    """
    is_missing = not place.exists()
    here = "it is not in this worker's storage" if is_missing else "; ".join(wrong[:3])
    of_no_use = Outcome.ELSEWHERE if is_missing else Outcome.BAD
    if checkpoint.remote_at is None:
        # Of a worker with another storage that had no time to copy it; without copies there is one storage for all.
        return Fetched(of_no_use if host.copies else Outcome.BAD, here)
    if host.copies is None:
        return Fetched(Outcome.AWAY, f"{here}, and this worker has no ANNEAL_CHECKPOINT_URL to fetch its copy")
    remote = host.copies.remote
    try:
        _fetch(host, remote, run, checkpoint, place, patience)
    except BadCopy as error:
        # Whoever still has it whole is to send it once more.
        with host.engine.begin() as connection:
            connection.execute(copies.spoilt(checkpoint.id, checkpoint.remote_at))
        return Fetched(of_no_use, f"{here}, and {error}")
    except NotThere:
        outcome = Outcome.AWAY if is_missing else Outcome.BAD
        return Fetched(outcome, f"{here}, and {remote.url} has no copy of it")
    except Unreachable as error:
        return Fetched(Outcome.AWAY, f"{here}, and its copy at {remote.url} cannot be fetched now: {error}")
    return Fetched(Outcome.WHOLE, f"{here}; its copy at {remote.url} was fetched")


def _fetch(host: Host, remote: Remote, run: Any, checkpoint: Any, place: Path, patience: Patience) -> None:
    lacking = Room(host.storage.root, host.settings.disk_reserve_bytes).lacking(checkpoint.bytes)
    if lacking:
        raise OSError(errno.ENOSPC, f"{checkpoint.name} does not fit on the disk: {lacking}")
    # Two runs that go on from one checkpoint may fetch it at the same time.
    own_name = f"{host.id}.{run.id}"
    staging = place.with_name(f".{place.name}.{own_name}")
    told = -_TELL_SECONDS

    def on_piece() -> None:
        nonlocal told
        patience.check()
        if time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            done = min(_bytes_below(staging), checkpoint.bytes)
            message = f"fetching {checkpoint.name} from {remote.url}"
            said = {"phase": "fetching", "done": done, "total": checkpoint.bytes, "message": message}
            patience.tell(NewEvent.of("progress", time.time(), said))

    began = time.monotonic()
    for tries in range(1, _TRIES + 1):
        patience.check()
        try:
            remote.fetch(place, checkpoint.manifest_sha256, own_name, on_piece)
        except Unreachable as error:
            log.warning("%s: %s, try %d: %s", checkpoint.run_id, checkpoint.name, tries, error)
            if tries == _TRIES:
                raise
            host.draining.wait(_PAUSE_SECONDS * tries)
        else:
            log.info("%s: %s fetched in %.1f s", checkpoint.run_id, checkpoint.name, time.monotonic() - began)
            return


def _bytes_below(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # it is renamed once it is whole
            size += path.stat().st_size if path.is_file() else 0
    return size
