"""Handles of processes: a signal through one reaches the process that was opened, and never a later one with its id.

A handle is a pidfd of the kernel. Where these are refused, as in some sandboxes, the process is identified by its start
time, and its end is noticed by polling.
"""

import errno
import functools
import os
import select
import signal
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

from app.infra.process.identity import process_stat, start_time

POLL_SECONDS = 0.05
_REFUSALS = {errno.ENOSYS, errno.EPERM, errno.EINVAL}


class ProcessHandle(ABC):
    """Handle of one process, whose end need not be a child's."""

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended."""

    @abstractmethod
    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal; return False if the process has ended.

        Raises:
            PermissionError: This user may not signal it.
        """

    @abstractmethod
    def wait(self, seconds: float = 0.0) -> bool:
        """Wait for the end of the process; return False if it still runs after `seconds`."""

    @abstractmethod
    def reap(self) -> Any:
        """Return the exit of a child (`os.waitid`) and remove its zombie; None while it runs.

        Raises:
            ChildProcessError: It is no child, or was reaped before.
        """

    @abstractmethod
    def close(self) -> None:
        """Close every descriptor of the handle."""

    def __enter__(self) -> "ProcessHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PidfdHandle(ProcessHandle):
    """Handle by a pidfd, which it owns."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def send_signal(self, number: signal.Signals) -> bool:
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def wait(self, seconds: float = 0.0) -> bool:
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))

    def reap(self) -> Any:
        return os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG)

    def close(self) -> None:
        os.close(self._descriptor)


class PolledHandle(ProcessHandle):
    """Handle by id and start time.

    The id could pass to another process between the check of the start time and the signal; only a pidfd rules it out.
    """

    def __init__(self, pid: int, start_time: int) -> None:
        self._pid = pid
        self._start_time = start_time
        self._watched: tuple[int, threading.Thread] | None = None
        self._closed = threading.Event()

    def fileno(self) -> int:
        if self._watched is None:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            watcher = threading.Thread(target=self._watch_end, args=[writing], name="process end", daemon=True)
            try:
                watcher.start()
            except RuntimeError:  # the user may have no more threads
                os.close(reading)
                os.close(writing)
                raise
            self._watched = reading, watcher
        return self._watched[0]

    def _watch_end(self, writing: int) -> None:
        while not self._has_ended() and not self._closed.wait(POLL_SECONDS):
            pass
        os.close(writing)

    def send_signal(self, number: signal.Signals) -> bool:
        stat = process_stat(self._pid)
        if stat is None or stat.start_time != self._start_time:
            return False
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)
            return True
        return False

    def wait(self, seconds: float = 0.0) -> bool:
        deadline = time.monotonic() + seconds
        while not (has_ended := self._has_ended()) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))
        return has_ended

    def _has_ended(self) -> bool:
        stat = process_stat(self._pid)
        return stat is None or stat.start_time != self._start_time or stat.has_ended

    def reap(self) -> Any:
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG)

    def close(self) -> None:
        self._closed.set()
        if self._watched is not None:
            reading, watcher = self._watched
            watcher.join()  # it closes the other end of the pipe
            os.close(reading)


def open_process(pid: int) -> ProcessHandle:
    """Open a process.

    Raises:
        ProcessLookupError: There is no such process.
        OSError: No descriptor is left.
    """
    if pidfd_refusal() is None:
        return PidfdHandle(os.pidfd_open(pid))
    return PolledHandle(pid, start_time(pid))


@functools.cache
def pidfd_refusal() -> str | None:
    """Return why this system refuses pidfds; None if they can be opened, signaled and waited for."""
    if not hasattr(os, "pidfd_open"):
        return "this Python was built without them"
    try:
        own = os.pidfd_open(os.getpid())
        try:
            signal.pidfd_send_signal(own, 0)
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, own, os.WEXITED | os.WNOHANG)
        finally:
            os.close(own)
    except OSError as error:
        if error.errno in _REFUSALS:
            return str(error)
        raise
    return None
