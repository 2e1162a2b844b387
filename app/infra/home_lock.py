"""Lock that allows one `anneal up` per ANNEAL_HOME, and by which clients see that it runs."""

import fcntl
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from anneal.local_service import is_held, try_lock
from app.infra.errors import SetupError
from app.infra.private_files import make_private_folder
from app.infra.process.handle import ProcessHandle, open_process

_PATIENCE_SECONDS = 1.0
"""Seconds of tries for the lock, which `is_held` takes for a moment."""


class HomeLock:
    """File lock that allows one `anneal up` per home; the kernel releases it however the process ends."""

    def __init__(self, home: Path) -> None:
        self.path = home / "lock"
        self._descriptor: int | None = None

    def __enter__(self) -> "HomeLock":
        make_private_folder(self.path.parent)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (is_ours := try_lock(descriptor, fcntl.LOCK_EX)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not is_ours:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise SetupError(
                f"`anneal up` is already running on {self.path.parent} (process {holder}): use it, stop it, "
                "or set ANNEAL_HOME to another folder."
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def holder_pid(home: Path) -> int | None:
    """Return the process id of the running `anneal up` of this home, if it is visible from here."""
    holder = _open_holder(home)
    if holder is None:
        return None
    with holder:
        return holder.pid


def stop_holder(home: Path) -> "Holder | None":
    """Ask the `anneal up` of this home to stop and return it; None if none runs here that this user may stop."""
    holder = _open_holder(home)
    if holder is not None and not holder.stop():
        holder.close()
        return None
    return holder


class Holder:
    """Running `anneal up`, by a handle that never means another process."""

    def __init__(self, pid: int, process: ProcessHandle) -> None:
        self.pid = pid
        self._process = process

    def stop(self) -> bool:
        """Send SIGTERM; return False if this user may not."""
        try:
            self._process.send_signal(signal.SIGTERM)  # it may have just ended
        except PermissionError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for its end; return False if it still runs after `seconds`."""
        return self._process.wait(seconds)

    def close(self) -> None:
        """Close the handle."""
        self._process.close()

    def __enter__(self) -> "Holder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_holder(home: Path) -> Holder | None:
    """Open the process whose id is in the lock, if it has the lock open: in another container the id means another."""
    path = home / "lock"
    try:
        pid = int(path.read_text())
        process = open_process(pid)
    except (OSError, ValueError):
        return None
    if is_held(home) and _has_open(pid, path):
        return Holder(pid, process)
    process.close()
    return None


def _has_open(pid: int, path: Path) -> bool:
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it was just closed
                if descriptor.samefile(path):
                    return True
    return False
