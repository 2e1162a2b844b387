"""One checkpoint at a time on its way to the disk while training goes on, written by a thread."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worker.training.failures import OUT_OF_MEMORY, TrainingFailure, classify
from worker.training.pulse import Alive

_LOOK_SECONDS = 0.2
_LONG_SECONDS = 10.0


class Abandoned(Exception):
    """What is being written is not wanted any more."""


class InFlight:
    """The one checkpoint that is being written, if any.

    The thread itself gives no sign of life: that a state gets to the disk must not hide a loop that stands still.
    While the loop waits for the thread, it passes on what the thread gets done, so that a large state on a slow disk is
    no hang either.
    """

    def __init__(self, on_lack: Callable[[int | None, str], None]) -> None:
        """`on_lack` hears, in the loop, of the step whose checkpoint the machine had too little memory for, and why."""
        self._on_lack = on_lack
        self._thread: threading.Thread | None = None
        self._failure: TrainingFailure | None = None
        self._step: int | None = None
        self._done = 0
        """Pieces of work done by the thread; that it grows is what is passed on."""
        self._is_abandoned = False
        self._began = 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint is being written at this moment."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def step(self) -> int | None:
        """The step of the checkpoint that was begun last, in whatever state it is."""
        return self._step

    def begin(self, write: Callable[[Alive], None], step: int | None = None) -> None:
        """Let a thread call `write`, with what it is to call for each piece of its work. Call `wait` before."""

        def work() -> None:
            try:
                write(self._on_progress)
            except Abandoned:
                pass
            except Exception as error:
                self._failure = classify(error)

        self._began, self._step = time.monotonic(), step
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what the thread failed with, once it is known; waits for nothing.

        That the machine lacked memory for it is told, and no failure: nothing of the training would mend it, and the
        loop can write without.

        Raises:
            TrainingFailure: with a stable code.
        """
        failure, self._failure = self._failure, None
        if failure is not None and failure.code == OUT_OF_MEMORY:
            step, self._step = self._step, None  # it is not on the disk
            self._on_lack(step, failure.message)
        elif failure is not None:
            raise failure

    def wait(self, alive: Alive, on_long: Callable[[float], None] = lambda _: None) -> None:
        """Wait until nothing is being written; signs of life are those of the thread's work.

        `on_long` is called once, with the seconds that the writing has taken so far, where this takes long.

        Raises:
            TrainingFailure: what was being written could not be.
        """
        self._see_through(alive, on_long)
        self.check()

    @contextmanager
    def settled_after(self, alive: Alive, tell: Callable[[str], None]) -> Iterator[None]:
        """Whatever ends the block, nothing is being written after it.

        A failure of the block itself comes first: `tell` then hears of one of the writing.
        """
        try:
            yield
        except BaseException:
            self._see_through(alive)
            failure, self._failure = self._failure, None
            if failure is not None:
                tell(f"The checkpoint that was on its way could not be written either. {failure.message}")
            raise
        self.wait(alive)

    def abandon(self) -> None:
        """What is being written is not wanted any more: end it as soon as it says that it got something done."""
        self._is_abandoned = True

    def _see_through(self, alive: Alive, on_long: Callable[[float], None] = lambda _: None) -> None:
        if self._thread is None:
            return
        seen, since, told = -1, time.monotonic(), False
        while self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            if self._done != seen:
                seen = self._done
                alive()
            if not told and time.monotonic() - since > _LONG_SECONDS:
                told = True
                on_long(time.monotonic() - self._began)
        self._thread = None

    def _on_progress(self) -> None:
        if self._is_abandoned and threading.current_thread() is self._thread:  # and not one that only looks on
            raise Abandoned
        self._done += 1
