"""Mark of a restore that has started: until it is complete, no service may start on half of the data."""

from pathlib import Path
from typing import Any

from anneal.local_service import read_json
from app.config import Settings
from app.infra.errors import SetupError
from app.infra.private_files import write_private_json


def mark_path(settings: Settings) -> Path:
    """Return the path of the mark, beside the files that are restored."""
    return (settings.home if settings.storage_url is not None else settings.storage_root) / ".restoring.json"


def read_mark(settings: Settings) -> dict[str, Any] | None:
    """Return what the unfinished restore wrote into its mark; None if there is none."""
    return read_json(mark_path(settings))


def write_mark(settings: Settings, facts: dict[str, Any]) -> None:
    """Mark the beginning of a restore."""
    write_private_json(mark_path(settings), facts)


def remove_mark(settings: Settings) -> None:
    """Mark the end of a restore."""
    mark_path(settings).unlink(missing_ok=True)


def refuse_unfinished_restore(settings: Settings) -> None:
    """Raise `SetupError` if a restore was interrupted."""
    path = mark_path(settings)
    if path.exists():
        backup = (read_json(path) or {}).get("backup", "DIR")
        raise SetupError(
            f"A restore was interrupted or is in progress ({path}): run `anneal restore {backup}` to complete it first."
        )
