"""Signs of life: that a training process gets on, told to its supervisor where it has nothing else to say.

A supervisor kills a trainer of which it hears nothing for long. Steps between two metrics, a checkpoint on its way
to a slow disk and a model on its way from the hub are work, and each of them says so by a sign. A sign is no event:
the supervisor hears it and forgets it. None is ever given by a clock alone, since a trainer that stands still has to
be found. Imports nothing heavy.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ALIVE = b'{"type": "alive"}'
"""The sign: a record like no other, known by its bytes."""

_SECONDS_BETWEEN = 1.0

Alive = Callable[[], None]
"""What gives a sign of life; call it wherever something got done, as often as that is."""


def nobody() -> None:
    """A sign of life to nobody, for who works unwatched."""


class Pulse:
    """Gives signs of life through the socket that records go through, at most one a second."""

    def __init__(self, descriptor: int | None) -> None:
        """`descriptor` is that of the records; None (a run by hand) gives no signs."""
        self._descriptor = descriptor
        self._socket: socket.socket | None = None
        self._next = 0.0

    def beat(self) -> None:
        """Give a sign, or leave it out: for the last one is fresh, or the supervisor has yet to take up others.

        Never waits, and costs less than a microsecond when it is left out. Ends the process when the supervisor is
        gone, as a record does.
        """
        now = time.monotonic()
        if now < self._next or self._descriptor is None:
            return
        self._next = now + _SECONDS_BETWEEN
        if self._socket is None:
            # A descriptor of its own: closing this object must not close that of the records.
            self._socket = socket.socket(fileno=os.dup(self._descriptor))
        try:
            self._socket.send(ALIVE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # the queue is full of what was said and not heard yet: signs enough
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
            os._exit(1)


def each(things: Iterable[Any], alive: Alive) -> Iterator[Any]:
    """`things`, with a sign of life whenever another one is asked for."""
    for thing in things:
        alive()
        yield thing


@contextmanager
def while_growing(alive: Alive, *folders: Path, every: float = _SECONDS_BETWEEN) -> Iterator[None]:
    """For the time of the block, give a sign of life whenever `folders` hold more than at the last look.

    For a call that writes much and returns late: a download, the weights of a checkpoint. One that stands still gives
    none.
    """
    over = threading.Event()

    def look() -> None:
        before = _held(folders)
        while not over.wait(every):
            now = _held(folders)
            if now > before:
                alive()
            before = now

    watch = threading.Thread(target=look, name="growth", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _held(folders: Iterable[Path]) -> int:
    """Bytes of all files, and those of them that have a place on the disk.

    Both, since safetensors and the hub's own downloader give a file its full length before they fill it.
    """
    held = 0
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                try:
                    status = os.lstat(os.path.join(place, name))  # noqa: PTH118 - may be many, every second
                except FileNotFoundError:
                    continue  # renamed or gone meanwhile
                held += status.st_size + 512 * status.st_blocks
    return held
