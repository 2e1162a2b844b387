"""The trainers' own record of what ran when, against which the tests check everything else.

Imports nothing heavy: the `fake` backend and the tests use it without torch.
"""

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.infra.process.identity import boot_id
from worker.wire.reporter import plain, write_all


class Journal:
    """The trainers' own record of what ran when: one file per run, shared by all its attempts.

    A line is written immediately and in one piece, and none is older than the one before it, whatever thread writes it:
    checkpoints are saved beside the training. Start, save and stop are on disk before the call returns, steps within
    0.2 s.
    """

    SYNC_SECONDS = 0.2

    def __init__(self, path: str | Path | None, attempt: int) -> None:
        """Open the journal of a run; None records nothing, as rank 0 does for all ranks."""
        self._attempt = attempt
        self._boot_id = boot_id()
        self._synced = 0.0
        self._order = threading.Lock()
        self._file = None if path is None else os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = 0 if self._file is None else os.fstat(self._file).st_size
        # A power failure may have truncated the last line of an earlier attempt; ours must start on a new one.
        self._torn = self._file is not None and size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def start(self) -> None:
        """Record that training starts: this process now counts as the run's only trainer."""
        self._write({"event": "start"}, sync=True)

    def step(self, n: int, loss_hex: str, samples: Sequence[Any]) -> None:
        """Record step `n`; `loss_hex` is `float.hex` of its exact loss, `samples` the row ids it saw."""
        self._write({"event": "step", "step": n, "loss_hex": loss_hex, "samples": list(samples)}, sync=False)

    def skip_step(self, n: int, samples: Sequence[Any]) -> None:
        """Record that step `n` was skipped: its rows were not trained on, and no weight has changed."""
        self._write({"event": "skip_step", "step": n, "samples": list(samples)}, sync=False)

    def save(self, step: int) -> None:
        """Record that a checkpoint of `step` is on disk."""
        self._write({"event": "save", "step": step}, sync=True)

    def stop(self, outcome: str) -> None:
        """Record that nothing of this attempt will run any more."""
        self._write({"event": "stop", "outcome": outcome}, sync=True)

    def _write(self, event: dict[str, Any], sync: bool) -> None:
        if self._file is None:
            return
        with self._order:
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            about = {"attempt": self._attempt, "pid": os.getpid(), "boot_id": self._boot_id, "t": now}
            line = json.dumps({**event, **about}, default=plain) + "\n"
            write_all(self._file, ("\n" + line if self._torn else line).encode())
            self._torn = False
        # Not under the lock: no step waits for the disk because of a save.
        if sync:
            os.fsync(self._file)
        elif now - self._synced >= self.SYNC_SECONDS:
            os.fdatasync(self._file)
        else:
            return
        self._synced = now


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
