"""Files of a local model, whether an operator or a training process has put them there."""

import hashlib
import json
import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from app.infra.files import file_manifest
from app.infra.files.object_store import ObjectMissing, ObjectStore
from app.infra.files.untrusted_folder import OutsideStorage, entries_below, open_below, read_below
from app.infra.storage import Storage

_MAX_CONFIG_BYTES = 2**20


class ModelFolder:
    """Folder of a local model.

    The output of a run belongs to the user that trains: no link in it is followed, and nothing in it keeps a reader
    waiting. The operator's models may consist of links, as those of a hub cache do. If the storage is an object store,
    the output of a run is read from there, and every method may raise `StoreUnavailable`.
    """

    def __init__(self, storage: Storage, path: Path) -> None:
        self.path = path
        self._storage = storage
        self._is_output = path.is_relative_to(storage.runs)
        self._objects: ObjectStore | None = storage.objects if self._is_output else None

    def has_file(self, name: str) -> bool:
        """Return True if there is a file with this name."""
        if self._objects is not None:
            return name in self._stored_files
        if not self._is_output:
            return (self.path / name).is_file()
        try:
            os.close(open_below(*self._locate_file(name)))
        except (OSError, ValueError):
            return False
        return True

    def read_file(self, name: str, most_bytes: int) -> bytes:
        """Return the content of a file.

        Raises:
            OutsideStorage: It is no regular file, has more than `most_bytes`, or is a link in the output of a run.
            OSError: It cannot be read.
        """
        if self._objects is not None:
            return self._read_stored(self._objects, name, most_bytes)
        return read_below(*self._locate_file(name), most_bytes)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file; an empty one if that fails."""
        try:
            content = json.loads(self.read_file(name, _MAX_CONFIG_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def weight_sizes(self) -> dict[str, int]:
        """Return the size of each safetensors file, by name."""
        if self._objects is not None:
            sizes = {name: size for name, (size, _) in self._stored_files.items() if "/" not in name}
        elif self._is_output:
            sizes = {}
            with suppress(OSError):
                sizes = {name: about.st_size for name, about in entries_below(self.path) if about and "/" not in name}
        else:
            sizes = {path.name: path.stat().st_size for path in self.path.glob("*.safetensors") if path.exists()}
        return {name: size for name, size in sizes.items() if name.endswith(".safetensors")}

    @cached_property
    def _stored_files(self) -> dict[str, tuple[int, str]]:
        """Size and SHA-256 of each file of an output in the object store, by its path in this folder."""
        run_id, attempt, output, *below = self.path.relative_to(self._storage.runs).parts
        if self._objects is None or output != "output" or not attempt[1:].isdecimal():
            return {}
        key = self._storage.key_of(self._storage.output_manifest(run_id, int(attempt[1:])))
        try:
            files = file_manifest.parse_manifest(self._objects.read(key, file_manifest.MAX_BYTES))
        except (ObjectMissing, ValueError):  # `OutsideStorage` is a ValueError
            return {}
        prefix = "".join(f"{part}/" for part in below)
        return {name.removeprefix(prefix): about for name, about in files.items() if name.startswith(prefix)}

    def _read_stored(self, objects: ObjectStore, name: str, most_bytes: int) -> bytes:
        if name not in self._stored_files:
            raise FileNotFoundError(2, "file not found", name)
        try:
            content = objects.read(self._storage.key_of(self.path / name), most_bytes)
        except ObjectMissing as error:
            raise FileNotFoundError(2, "file not found", name) from error
        if (len(content), hashlib.sha256(content).hexdigest()) != self._stored_files[name]:
            raise OutsideStorage(f"{name!r} has other contents than were stored")
        return content

    def _locate_file(self, name: str) -> tuple[Path, str]:
        if self._is_output:
            root = self._storage.runs
            return root.resolve(), (self.path / name).relative_to(root).as_posix()
        file = Path(os.path.realpath(self.path / name, strict=True))
        return file.parent, file.name
