"""Checkpoint engine plugins: a thread passes them checkpoints, and only the end of training waits for it, briefly."""

import threading
import time
from pathlib import Path

from worker.training import plugins
from worker.training.failures import TrainingFailure
from worker.training.run import Run

_END_SECONDS = 120.0
_STOP_SECONDS = 20.0
"""Short, since a stopping trainer is killed after its grace period; the engine keeps what it has by then."""
_POLL_SECONDS = 0.2


class Keeper:
    """Passes complete checkpoints to the engine, the newest first: if it is slow, the older ones matter less.

    An upload does not report its progress, so the thread sends no heartbeat, and a wait for it is limited.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._waiting: list[Path] = []
        self._current: Path | None = None
        self._thread: threading.Thread | None = None
        self._failure: TrainingFailure | None = None

    def keep(self, folder: Path) -> None:
        """Queue a copy of the checkpoint in `folder`, if an engine is configured; does not wait."""
        if self._run.config.trainer_options.checkpoint_engine is None:
            return
        with self._changed:
            self._waiting.append(folder)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoint engine", daemon=True)
                self._thread.start()

    def check(self) -> None:
        """Raise the failure that makes the engine unusable, if there is one by now.

        Raises:
            TrainingFailure: `config_error`.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Wait for the copies at the end of training, for a limited time; report those that are not finished then."""
        began = time.monotonic()
        with self._changed:
            while self._waiting or self._current:
                seconds = _END_SECONDS if self._run.stop_requested is None else _STOP_SECONDS
                if time.monotonic() - began >= seconds:
                    break
                self._changed.wait(_POLL_SECONDS)
            left = sorted({*self._waiting, *([self._current] if self._current else [])})
            self._waiting.clear()
        if left:
            names = ", ".join(path.name for path in left)
            line = (
                f"The checkpoint engine did not finish within {seconds:.0f} s of the end: it may have no copy of "
                f"{names}. The checkpoints in the run's own folder are complete."
            )
            self._run.report.message(line, "warning")

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                folder = self._current = self._waiting.pop()
            try:
                if folder.is_dir():  # or it was cleaned up before its turn came
                    plugins.keep(self._run, folder)
            except TrainingFailure as failure:
                self._failure = failure
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()
