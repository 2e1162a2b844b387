"""Checks whether the service of this machine runs, and reads the files that it writes for its owner."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any


def is_held(home: Path) -> bool:
    """Return True while an `anneal up` of this home runs: only its owner can open the lock."""
    try:
        descriptor = os.open(home / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int) -> bool:
    """Take a lock if it is free; return True if it was."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`, or None if the file is missing or invalid."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
