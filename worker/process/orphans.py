"""Processes that a training process leaves in sessions of their own, which killing its session does not reach.

The worker and its zygote adopt them: the kernel makes an orphan a child of its nearest ancestor that asked for that.
Each living training process adopts its own, so an orphan that arrives here is one of a training process that has ended,
or of one that gave it away.
"""

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from app.infra.process.identity import process_stat

log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_SECONDS = 2.0

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Have the kernel make every orphan among the descendants a child of this process."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Orphans:
    """Orphans that this process has adopted: its children without those that it started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: set[int] = set()
        self._adopts = False

    def adopt(self) -> None:
        """Adopt orphans from now on; every child in a session of its own must be started within `starting`."""
        become_subreaper()
        self._adopts = True

    @contextmanager
    def starting(self) -> Iterator[set[int]]:
        """Provide the set to which the id of a child that is started in this context is added."""
        with self._lock:
            yield self._started

    def kill(self) -> None:
        """Kill every adopted process, and what it leaves in turn, until none is left; a warning if one does not die.

        Children in the session of this process are not adopted: a process leaves its session for ever.
        """
        if not self._adopts:
            return
        own, deadline, pause = os.getsid(0), time.monotonic() + _PATIENCE_SECONDS, 0.001
        with self._lock:
            children = _child_sessions()
            self._started &= children.keys()
            while adopted := [pid for pid, session in children.items() if session != own and pid not in self._started]:
                for pid in adopted:
                    with suppress(ProcessLookupError, ChildProcessError):
                        os.kill(pid, signal.SIGKILL)  # not reaped yet, so its id is not another process's
                        os.waitpid(pid, os.WNOHANG)
                if time.monotonic() > deadline:
                    log.warning("processes %s, left by a training process, do not die", adopted)
                    return
                time.sleep(pause)
                pause = min(pause * 2, 0.05)
                children = _child_sessions()


def _child_sessions() -> dict[int, int]:
    """Return the sessions of the children of this process, by their ids."""
    sessions = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            stat = process_stat(int(entry.name))
            if stat is not None and stat.parent == os.getpid():
                sessions[int(entry.name)] = stat.session
    return sessions
