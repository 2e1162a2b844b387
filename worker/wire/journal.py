"""The trainers' own record of what ran when, against which the tests check everything else; runs of users have none.

Imports nothing heavy: the `fake` backend and the tests use it without torch.
"""

import ctypes
import errno
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.infra.files.disk_space import FULL
from app.infra.process.identity import boot_id
from worker.wire.reporter import to_plain
from worker.wire.waiting_bytes import WaitingBytes

_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE, which `os.posix_fallocate` does not have."""
_fallocate = ctypes.CDLL(None).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Journal:
    """The trainers' own record of what ran when: one file per run, shared by all its attempts.

    A line is written immediately and in one piece, and none is older than the one before it, whatever thread writes it:
    checkpoints are saved beside the training. Start, save and stop are on disk before the call returns, steps within
    0.2 s. While the disk is full, lines take the blocks that were reserved for them, and further ones wait in memory.
    """

    SYNC_SECONDS = 0.2
    ROOM_BYTES = 2**16

    def __init__(self, path: str | Path | None, attempt: int) -> None:
        """Open the journal of a run; None records nothing."""
        self._attempt = attempt
        self._boot_id = boot_id()
        self._synced = 0.0
        self._order = threading.Lock()
        self._waiting = WaitingBytes()
        self._reserved_until = 0
        self._file = None if path is None else os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = 0 if self._file is None else os.fstat(self._file).st_size
        # A power failure may have truncated the last line of an earlier attempt; ours must start on a new one.
        self._torn = self._file is not None and size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        self._reserve_room(size)

    def record_start(self) -> None:
        """Record that training starts: this process now counts as the run's only trainer."""
        self._write_event({"event": "start"}, sync=True)
        if self._waiting:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def record_step(self, n: int, loss_hex: str, samples: Sequence[Any]) -> None:
        """Record step `n`; `loss_hex` is `float.hex` of its exact loss, `samples` the row ids it saw."""
        self._write_event({"event": "step", "step": n, "loss_hex": loss_hex, "samples": list(samples)}, sync=False)

    def skip_step(self, n: int, samples: Sequence[Any]) -> None:
        """Record that step `n` was skipped: its rows were not trained on, and no weight has changed."""
        self._write_event({"event": "skip_step", "step": n, "samples": list(samples)}, sync=False)

    def record_save(self, step: int) -> None:
        """Record that a checkpoint of `step` is on disk."""
        self._write_event({"event": "save", "step": step}, sync=True)

    def record_stop(self, outcome: str) -> None:
        """Record that nothing of this attempt will run any more."""
        self._write_event({"event": "stop", "outcome": outcome}, sync=True)

    def _write_event(self, event: dict[str, Any], sync: bool) -> None:
        if self._file is None:
            return
        with self._order:
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            about = {"attempt": self._attempt, "pid": os.getpid(), "boot_id": self._boot_id, "t": now}
            line = json.dumps({**event, **about}, default=to_plain) + "\n"
            self._waiting.append(self._file, ("\n" + line if self._torn else line).encode())
            self._torn = False
            self._reserve_room(os.fstat(self._file).st_size)
            if self._waiting:
                return
        # Not under the lock: no step waits for the disk because of a save.
        try:
            if sync:
                os.fsync(self._file)
            elif now - self._synced >= self.SYNC_SECONDS:
                os.fdatasync(self._file)
            else:
                return
        except OSError as error:
            if error.errno not in FULL:  # a network file system finds out only now
                raise
        self._synced = now

    def _reserve_room(self, size: int) -> None:
        """Reserve blocks behind the end of the file; without effect where the file system cannot, or is full."""
        if self._file is not None and size + self.ROOM_BYTES // 2 > self._reserved_until:
            self._reserved_until = size + self.ROOM_BYTES
            _fallocate(self._file, _KEEP_SIZE, size, self.ROOM_BYTES)


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """Return the events of a journal in order; a truncated line (power failure) is skipped, a missing file is empty."""
    events = []
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events
