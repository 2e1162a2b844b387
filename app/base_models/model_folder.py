"""Files of a local model, whether an operator or a training process has put them there."""

import json
import os
from pathlib import Path
from typing import Any

from app.infra.storage import Storage
from app.infra.untrusted_folder import open_below, read_below

_MAX_CONFIG_BYTES = 2**20


class ModelFolder:
    """Folder of a local model.

    The output of a run belongs to the user that trains: no link in it is followed, and nothing in it keeps a reader
    waiting. The operator's models may consist of links, as those of a hub cache do.
    """

    def __init__(self, storage: Storage, path: Path) -> None:
        self.path = path
        self._storage = storage
        self._is_output = path.is_relative_to(storage.runs)

    def has(self, name: str) -> bool:
        """Return True if there is a file with this name."""
        if not self._is_output:
            return (self.path / name).is_file()
        try:
            os.close(open_below(*self._place(name)))
        except (OSError, ValueError):
            return False
        return True

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the content of a file.

        Raises:
            OutsideStorage: It is no regular file, has more than `most_bytes`, or is a link in the output of a run.
            OSError: It cannot be read.
        """
        return read_below(*self._place(name), most_bytes)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file; an empty one if that fails."""
        try:
            content = json.loads(self.read(name, _MAX_CONFIG_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def _place(self, name: str) -> tuple[Path, str]:
        if self._is_output:
            root = self._storage.runs
            return root.resolve(), (self.path / name).relative_to(root).as_posix()
        file = Path(os.path.realpath(self.path / name, strict=True))
        return file.parent, file.name
