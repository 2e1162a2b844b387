"""A checkpoint that is not here, or not whole: fetched from its second copy before an older one is taken."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.host import Host
from worker.remote import BadCopy, NotThere, Remote, Stopped, Unreachable

log = logging.getLogger(__name__)

_TRIES = 3
_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class Fetched:
    """What came of it."""

    is_whole: bool
    is_bad: bool
    """Nobody will ever resume from it: neither here nor there is it what was written."""
    why: str
    """In a part of a sentence: what was wrong here, and what came of the copy."""
    is_known: bool = False
    """It cannot be reached now, and there is a copy that probably is whole."""


def instead(host: Host, checkpoint: Any, place: Path, wrong: list[str]) -> Fetched:
    """Have the copy of `checkpoint` take the place of what is `wrong` there.

    Raises:
        OSError: this worker's own storage cannot take it.
    """
    is_missing = not place.exists()
    here = "it is not in this worker's storage" if is_missing else "; ".join(wrong[:3])
    if checkpoint.remote_at is None:
        # Of a worker with another storage that had no time to copy it: that may go on from it one day.
        return Fetched(False, not (is_missing and host.copies), here)
    if host.copies is None:
        return Fetched(False, False, f"{here}, and this worker has no ANNEAL_CHECKPOINT_URL to fetch its copy", True)
    remote = host.copies.remote
    try:
        _fetch(host, remote, checkpoint, place)
    except BadCopy as error:
        return Fetched(False, True, f"{here}, and {error}")
    except NotThere:
        return Fetched(False, not is_missing, f"{here}, and {remote.url} has no copy of it", is_missing)
    except (Unreachable, Stopped) as error:
        return Fetched(False, False, f"{here}, and its copy at {remote.url} cannot be fetched now: {error}", True)
    return Fetched(True, False, f"{here}; its copy at {remote.url} was fetched")


def _fetch(host: Host, remote: Remote, checkpoint: Any, place: Path) -> None:
    def on_piece() -> None:
        if host.draining.is_set():
            raise Stopped("this worker is to end")

    began = time.monotonic()
    for tries in range(1, _TRIES + 1):
        try:
            remote.fetch(place, checkpoint.manifest_sha256, host.id, on_piece)
        except Unreachable as error:
            log.warning("%s: %s, try %d: %s", checkpoint.run_id, checkpoint.name, tries, error)
            if tries == _TRIES or host.draining.wait(_PAUSE_SECONDS * tries):
                raise
        else:
            log.info("%s: %s fetched in %.1f s", checkpoint.run_id, checkpoint.name, time.monotonic() - began)
            return
