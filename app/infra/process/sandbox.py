"""Sandbox process for native code that parses untrusted input: limited memory and time, no credentials."""

import os
import resource
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from app.config import Settings

MAX_MEMORY_BYTES = 1024**3
MAX_PROCESSES = 4
"""Maximum number of processes per program. Token counters may wait for readers, never the reverse."""
_slots: dict[str, threading.BoundedSemaphore] = {}
_slots_lock = threading.Lock()
EXIT_INVALID_INPUT = 3
_PIECE = 256 * 1024


class ChildFailed(Exception):
    """Failure of a sandbox process, with the reason."""


class SandboxBusy(Exception):
    """Maximum number of processes of this program reached; try again later."""


class SandboxProcess:
    """Sandbox process that runs a module; killed when it is closed or garbage-collected.

    Raises `SandboxBusy` if the maximum number of processes is running. A single wait may take `silent` seconds, and all
    waits together `most_seconds`; otherwise methods raise `ChildFailed`.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        settings: "Settings",
        *,
        silent: float,
        most_seconds: float,
        environment: dict[str, str] | None = None,
    ) -> None:
        slots = _acquire_slot(program)
        try:
            # -P: do not import a folder called `app` from the current directory.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", program, *arguments],
                env={**settings.trainer_environment(), **(environment or {})},  # contains no credentials
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except BaseException:
            slots.release()
            raise
        self._silent = silent
        self._left = self._most_seconds = most_seconds
        # The pipes close with the last reference: a thread that still reads must not get a reused file descriptor.
        self.close = weakref.finalize(self, _kill_and_release, self._process, slots)

    def send(self, data: bytes) -> None:
        """Write all data to the standard input."""
        pipe = _require_pipe(self._process.stdin)
        os.set_blocking(pipe.fileno(), False)
        view = memoryview(data)
        while view:
            self._wait_for_pipe(pipe, select.POLLOUT)
            try:
                view = view[os.write(pipe.fileno(), view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                self._check_end()
                raise ChildFailed("its process exited early") from None

    def read(self) -> bytes:
        """Return the next bytes of the standard output, or empty bytes once the process has finished."""
        pipe = _require_pipe(self._process.stdout)
        self._wait_for_pipe(pipe, select.POLLIN)
        piece = os.read(pipe.fileno(), _PIECE)
        if not piece:
            self._check_end()
        return piece

    def _wait_for_pipe(self, pipe: IO[bytes], event: int) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        began = time.monotonic()
        if not poll.poll(min(self._silent, self._left) * 1000):
            raise ChildFailed(f"its process produced no output for {min(self._silent, self._left):.0f} seconds")
        self._left -= time.monotonic() - began
        if self._left <= 0:
            raise ChildFailed(f"it takes more than {self._most_seconds:,.0f} seconds")

    def _check_end(self) -> None:
        _, stderr = self._process.communicate()
        if self._process.returncode == EXIT_INVALID_INPUT:
            raise ChildFailed(stderr.decode(errors="replace").strip())
        if self._process.returncode != 0:
            raise ChildFailed("the process that read it crashed")


def run_confined(work: Callable[[], None], most_memory: int = MAX_MEMORY_BYTES) -> int:
    """Run `work` in the child with limited memory; print the reason of a failure and return the exit status."""
    resource.setrlimit(resource.RLIMIT_AS, (most_memory, most_memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        work()
    except BrokenPipeError:
        return 0
    except MemoryError:
        return _exit_invalid(f"it takes more than {most_memory:,} bytes of memory")
    except RecursionError:
        return _exit_invalid("it is nested too deeply")
    except Exception as error:
        return _exit_invalid(" ".join(str(error).split())[:300])
    return 0


def _exit_invalid(why: str) -> int:
    print(why, file=sys.stderr)  # noqa: T201
    return EXIT_INVALID_INPUT


def _require_pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ChildFailed("it has no pipe")
    return pipe


def _acquire_slot(program: str) -> threading.BoundedSemaphore:
    """Acquire a slot for a process of this program, to be released when the process has exited."""
    with _slots_lock:
        slots = _slots.setdefault(program, threading.BoundedSemaphore(MAX_PROCESSES))
    if not slots.acquire(blocking=False):
        raise SandboxBusy
    return slots


def _kill_and_release(process: subprocess.Popen[bytes], slots: threading.BoundedSemaphore) -> None:
    process.kill()
    process.wait()
    slots.release()
