"""Files below ANNEAL_HOME that processes share: written atomically, readable only by their owner."""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.infra.errors import SetupError

log = logging.getLogger(__name__)


def make_private_folder(folder: Path) -> Path:
    """Create `folder` with mode 0700 if it does not exist; raises `SetupError` if that fails."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"Cannot create {folder} ({error.strerror}); set ANNEAL_HOME to a folder that you can write to."
        ) from None
    return folder


def write_private(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` atomically, with mode 0600 from its creation; `durable`: its content survives a power failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_private_json(path: Path, value: dict[str, Any], *, durable: bool = True) -> None:
    """Replace `path` atomically with a JSON object, as `write_private` does."""
    write_private(path, json.dumps(value, indent=2) + "\n", durable=durable)


def try_write_private_json(path: Path, value: dict[str, Any], *, durable: bool = True) -> bool:
    """Replace a file that only informs, as `write_private_json` does; False if it cannot be written now.

    For files that others read to find or to observe a process, which must not end because its disk is full.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private_json(path, value, durable=durable)
    except OSError as error:
        log.info("%s is not up to date, because it cannot be written: %s", path, error.strerror)
        return False
    return True
