"""Files below ANNEAL_HOME that processes share: written atomically, readable only by their owner."""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any


class HomeError(Exception):
    """Problem with the home folder or the machine that the user can fix; the message says how."""


class PortTaken(HomeError):
    """Port of an embedded server that was free when chosen but that another program took."""


def make_private_folder(folder: Path) -> Path:
    """Create `folder` with mode 0700 if it does not exist; raises `HomeError` if that fails."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise HomeError(
            f"Cannot create {folder} ({error.strerror}); set ANNEAL_HOME to a folder that you can write to."
        ) from None
    return folder


def write_private(path: Path, text: str) -> None:
    """Replace `path` atomically, with mode 0600 from its creation."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_private_json(path: Path, value: dict[str, Any]) -> None:
    """Replace `path` atomically with a JSON object, mode 0600."""
    write_private(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`, or None if the file is missing or invalid."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class HomeLock:
    """File lock that allows one `anneal up` per home; the kernel releases it however the process ends."""

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
                f"`anneal up` is already running on {self.path.parent} (process {holder}): use it, stop it, "
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
