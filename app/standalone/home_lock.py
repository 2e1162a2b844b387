"""Lock that allows one `anneal up` per ANNEAL_HOME."""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from app.infra.errors import SetupError
from app.infra.private_files import make_private_folder


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
            raise SetupError(
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
