"""Background writer: a thread writes one checkpoint at a time while training continues."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worker.training.failures import OUT_OF_MEMORY, TrainingFailure, classify_error
from worker.wire.heartbeat import HeartbeatCallback

_POLL_SECONDS = 0.2
_LONG_SECONDS = 10.0


class Abandoned(Exception):
    """The checkpoint being written is no longer wanted."""


class AsyncWriter:
    """The one checkpoint that is being written, if any.

    The thread itself sends no heartbeat: progress of a write must not hide a training loop that hangs. While the loop
    waits for the thread, it forwards the thread's progress, so that a large state on a slow disk does not count as a
    hang either.
    """

    def __init__(self, on_lack: Callable[[int | None, str], None]) -> None:
        """Initialize without a checkpoint in progress.

        `on_lack` is called, in the loop, with the step whose checkpoint the machine had too little memory for, and why.
        """
        self._on_lack = on_lack
        self._thread: threading.Thread | None = None
        self._failure: TrainingFailure | None = None
        self._step: int | None = None
        self._done = 0
        """Pieces of work done by the thread; each increase is forwarded as a heartbeat."""
        self._is_abandoned = False
        self._began = 0.0

    @property
    def is_under_way(self) -> bool:
        """True while a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def step(self) -> int | None:
        """Step of the checkpoint that was started last, written or not; None if it failed for lack of memory."""
        return self._step

    def begin_write(self, write: Callable[[HeartbeatCallback], None], step: int | None = None) -> None:
        """Call `write` in a thread, with a function that it must call for each piece of its work.

        Call `wait` before.
        """

        def run_write() -> None:
            try:
                write(self._on_progress)
            except Abandoned:
                pass
            except Exception as error:
                self._failure = classify_error(error)
                if self._failure is not error:
                    self._failure.__cause__ = error  # the end of another rank is no failure of this one

        self._began, self._step = time.monotonic(), step
        self._thread = threading.Thread(target=run_write, name="checkpoint", daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise the failure of the thread, if any; does not wait.

        Too little memory is reported and is no failure: nothing in the training would fix it, and the loop can write
        without a copy.

        Raises:
            TrainingFailure: with a stable code.
        """
        failure, self._failure = self._failure, None
        if failure is not None and failure.code == OUT_OF_MEMORY:
            step, self._step = self._step, None  # it is not on the disk
            self._on_lack(step, failure.message)
        elif failure is not None:
            raise failure

    def wait(self, alive: HeartbeatCallback, on_long: Callable[[float], None] = lambda _: None) -> None:
        """Wait until nothing is being written; `alive` is called for each progress of the thread.

        If the wait is long, `on_long` is called once with the seconds that the write has taken so far.

        Raises:
            TrainingFailure: the checkpoint that was being written failed.
        """
        self._wait_for_thread(alive, on_long)
        self.raise_failure()

    @contextmanager
    def settled_after(self, alive: HeartbeatCallback, on_failure: Callable[[str], None]) -> Iterator[None]:
        """Ensure that nothing is being written after the block, however it ends.

        A failure of the block itself takes precedence: a failure of the write is then passed to `on_failure`.
        """
        try:
            yield
        except BaseException:
            self._wait_for_thread(alive)
            failure, self._failure = self._failure, None
            if failure is not None:
                on_failure(f"The checkpoint in progress could not be written either. {failure.message}")
            raise
        self.wait(alive)

    def abandon(self) -> None:
        """Discard the checkpoint being written: end it as soon as it reports its next piece of work."""
        self._is_abandoned = True

    def _wait_for_thread(self, alive: HeartbeatCallback, on_long: Callable[[float], None] = lambda _: None) -> None:
        if self._thread is None:
            return
        last_done, since, reported = -1, time.monotonic(), False
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
            if self._done != last_done:
                last_done = self._done
                alive()
            if not reported and time.monotonic() - since > _LONG_SECONDS:
                reported = True
                on_long(time.monotonic() - self._began)
        self._thread = None

    def _on_progress(self) -> None:
        if self._is_abandoned and threading.current_thread() is self._thread:  # not one that only monitors it
            raise Abandoned
        self._done += 1
