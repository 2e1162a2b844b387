"""Native code that reads what a stranger sent, in a process of its own: bounded memory and time, nothing to steal."""

import os
import resource
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from app.config import Settings

MOST_MEMORY = 1024**3
CANNOT_READ = 3
_PIECE = 256 * 1024


class ChildFailed(Exception):
    """The process cannot do its work, and why."""


class Child:
    """Runs a module; killed when it is closed or forgotten.

    A single wait may take `silent` seconds and all of them together `most_seconds`.
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
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            env={**settings.trainer_environment(), **(environment or {})},  # without any credential
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._silent = silent
        self._left = self._most_seconds = most_seconds
        # Its pipes close with the last reference: a thread that still reads must not meet another file instead.
        self.close = weakref.finalize(self, _end, self._process)

    def send(self, data: bytes) -> None:
        """Write all of it to the standard input."""
        pipe = _pipe(self._process.stdin)
        os.set_blocking(pipe.fileno(), False)
        view = memoryview(data)
        while view:
            self._wait(pipe, select.POLLOUT)
            try:
                view = view[os.write(pipe.fileno(), view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                self._check_end()
                raise ChildFailed("its process ended too early") from None

    def read(self) -> bytes:
        """What comes next from the standard output; nothing once the process has done its work."""
        pipe = _pipe(self._process.stdout)
        self._wait(pipe, select.POLLIN)
        piece = os.read(pipe.fileno(), _PIECE)
        if not piece:
            self._check_end()
        return piece

    def _wait(self, pipe: IO[bytes], event: int) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        began = time.monotonic()
        if not poll.poll(min(self._silent, self._left) * 1000):
            raise ChildFailed(f"nothing came of it for {min(self._silent, self._left):.0f} seconds")
        self._left -= time.monotonic() - began
        if self._left <= 0:
            raise ChildFailed(f"it takes more than {self._most_seconds:,.0f} seconds")

    def _check_end(self) -> None:
        _, told = self._process.communicate()
        if self._process.returncode == CANNOT_READ:
            raise ChildFailed(told.decode(errors="replace").strip())
        if self._process.returncode != 0:
            raise ChildFailed("the process that read it crashed")


def confined(work: Callable[[], None], most_memory: int = MOST_MEMORY) -> int:
    """In the child: do the work in that much memory; answers the exit status, having told why where it failed."""
    resource.setrlimit(resource.RLIMIT_AS, (most_memory, most_memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        work()
    except BrokenPipeError:
        return 0
    except MemoryError:
        return _cannot(f"it takes more than {most_memory:,} bytes of memory")
    except RecursionError:
        return _cannot("it is nested too deep")
    except Exception as error:
        return _cannot(" ".join(str(error).split())[:300])
    return 0


def _cannot(why: str) -> int:
    print(why, file=sys.stderr)  # noqa: T201
    return CANNOT_READ


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ChildFailed("it has no pipe")
    return pipe


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
