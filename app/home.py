"""Files below ANNEAL_HOME that processes share: written whole or not at all, readable by their owner only."""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any


class HomeError(Exception):
    """Something about the folder or the machine keeps the service from starting; the text tells what to do."""


class PortTaken(HomeError):
    """Another program listens on the port of a server, which was free when it was chosen."""


def make_private_folder(folder: Path) -> Path:
    """Create `folder` (mode 0700 where it is new); a sentence instead of a traceback where that is refused."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise HomeError(f"Cannot create {folder} ({error.strerror}); set ANNEAL_HOME to a folder of yours.") from None
    return folder


def write_private(path: Path, text: str) -> None:
    """Replace `path` atomically, mode 0600 from its first byte on."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_private_json(path: Path, value: dict[str, Any]) -> None:
    """As `write_private`, for a JSON object."""
    write_private(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None where there is no such file or nothing sensible in it."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class HomeLock:
    """One `anneal up` per home: held by a file lock, which the kernel lets go however the process ends."""

    def __init__(self, home: Path) -> None:
        self.path = home / "lock"
        self._descriptor: int | None = None

    def __enter__(self) -> "HomeLock":
        make_private_folder(self.path.parent)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise HomeError(
                f"`anneal up` is already running on {self.path.parent} (process {holder}): use it, end it, "
                "or set ANNEAL_HOME to another folder."
            ) from None
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
