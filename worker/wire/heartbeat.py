"""Heartbeats: show the supervisor that a training process makes progress when it has nothing else to report.

A supervisor kills a trainer that sends nothing for long. Steps between two metrics, a checkpoint written to a slow
disk and a model downloaded from the hub are work, and each of them sends heartbeats. A heartbeat is no event: the
supervisor does not store it. None is ever sent by a timer alone, since a trainer that hangs must be detected.
Imports nothing heavy.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.infra.files.tree import files_below

HEARTBEAT = b'{"type": "heartbeat"}'
"""Heartbeat record, which is recognized by its bytes."""
WAITING = b'{"type": "waiting"}'
"""Record of a rank that begins to wait for others, sent before training only: then it is known who hangs."""
RESUMED = b'{"type": "resumed"}'
"""Record of a rank that no longer waits."""

_SECONDS_BETWEEN = 1.0

HeartbeatCallback = Callable[[], None]
"""Function that sends a heartbeat; call it after each piece of work, as often as that is."""


def no_heartbeat() -> None:
    """Send no heartbeat, for callers that are not monitored."""


class Heartbeat:
    """Sends heartbeats through the socket of the records, at most one per second."""

    def __init__(self, descriptor: int | None) -> None:
        """Use `descriptor`, the socket of the records; None (a run by hand) sends no heartbeats."""
        self._descriptor = descriptor
        self._socket: socket.socket | None = None
        self._next = 0.0

    def send_if_due(self) -> None:
        """Send a heartbeat, unless the last one is recent or the supervisor has not yet read earlier records.

        Never blocks, and costs less than a microsecond when it is skipped. Ends the process when the supervisor is
        gone, as a record does.
        """
        now = time.monotonic()
        if now < self._next or self._descriptor is None:
            return
        self._next = now + _SECONDS_BETWEEN
        if self._socket is None:
            # A duplicate: closing this object must not close the descriptor of the records.
            self._socket = socket.socket(fileno=os.dup(self._descriptor))
        try:
            self._socket.send(HEARTBEAT, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # the queue is full of unread records, which show progress too
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
            os._exit(1)


def with_heartbeat(things: Iterable[Any], alive: HeartbeatCallback) -> Iterator[Any]:
    """Yield `things`, with a heartbeat whenever the next one is requested."""
    for thing in things:
        alive()
        yield thing


@contextmanager
def heartbeat_while_growing(
    alive: HeartbeatCallback, *folders: Path, every: float = _SECONDS_BETWEEN
) -> Iterator[None]:
    """During the block, send a heartbeat whenever `folders` have grown since the last check.

    For a call that writes much and returns late: a download, the weights of a checkpoint. One that hangs sends none.
    """
    over = threading.Event()

    def watch_growth() -> None:
        before = _bytes_held(folders)
        while not over.wait(every):
            now = _bytes_held(folders)
            if now > before:
                alive()
            before = now

    watch = threading.Thread(target=watch_growth, name="growth", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _bytes_held(folders: Iterable[Path]) -> int:
    """Return the sum of the lengths of all files and of their allocated bytes.

    Both, since safetensors and the hub's own downloader give a file its full length before they fill it.
    """
    held = 0
    for folder in folders:
        for entry in files_below(folder):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # renamed or gone meanwhile
            held += status.st_size + 512 * status.st_blocks
    return held
