"""Layout of a backup: a folder that is one only once its manifest is in it.

```
2026-11-26T192611Z/
  backup.json      written last
  database.dump    custom format of pg_dump
  files.jsonl      one line per file of `storage`
  storage/         the files, below the same paths as in ANNEAL_STORAGE
  secret.key       only if it was requested
```
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from app.infra.errors import SetupError
from app.infra.files.untrusted_folder import OutsideStorage, refuse_outside
from app.infra.private_files import write_private

MANIFEST = "backup.json"
DUMP = "database.dump"
INVENTORY = "files.jsonl"
FILES = "storage"
SECRET_KEY = "secret.key"
UNFINISHED = ".unfinished"
"""Folder of the backup that is being made, below the folder of backups; renamed when it is complete."""

_HASHED_BYTES = 1 << 20
_NAME = re.compile(r"(\d{4}-\d\d-\d\dT\d{6}Z)(?:-(\d+))?")
"""Name of a backup: its time, and a number if it is not the first of that second."""


@dataclass(frozen=True)
class FileEntry:
    """File of a backup; `path` is relative to the storage."""

    path: str
    bytes: int
    sha256: str
    mtime_ns: int
    """Modification time of the original; 0 if the original changed while it was copied."""
    mode: int
    """Permission bits of the original."""


class Problem(BaseModel):
    """Something that the database lists and whose files are missing or have other contents, or a file alone."""

    kind: Literal["dataset", "checkpoint", "output", "file"]
    id: str
    """For a file, its path below the storage."""
    problem: str

    def __str__(self) -> str:
        return f"{self.kind} {self.id}: {self.problem}"


def file_problem(path: str, problem: str) -> Problem:
    """Return the problem of a file alone; bytes of its name that are not UTF-8 become escapes."""
    return Problem(kind="file", id=path.encode(errors="backslashreplace").decode(), problem=problem)


class Described(BaseModel):
    """Size and SHA-256 of a file of the backup."""

    bytes: int
    sha256: str

    @classmethod
    def from_file(cls, path: Path) -> "Described":
        """Read the file."""
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while piece := file.read(_HASHED_BYTES):
                digest.update(piece)
                size += len(piece)
        return cls(bytes=size, sha256=digest.hexdigest())


class Manifest(BaseModel):
    """Content of `backup.json`."""

    format: Literal[1] = 1
    created_at: datetime
    version: str
    """Version of Anneal that made the backup."""
    revision: str
    """Revision of the database's schema."""
    client_major: int
    """Major version of the pg_dump that wrote the dump; a pg_restore of at least this version reads it."""
    database: Described
    inventory: Described
    files: int
    file_bytes: int
    object_store: str | None
    """URL of the object store that has the files, which are then not part of the backup."""
    removed: list[Problem]
    """Files that were deleted between the dump of the database and their copying."""
    problems: list[Problem]
    """Files that were missing or corrupt in the service itself."""


@dataclass(frozen=True)
class Backup:
    """Complete backup in `folder`."""

    folder: Path
    manifest: Manifest

    @property
    def dump(self) -> Path:
        """Dump of the database."""
        return self.folder / DUMP

    @property
    def files(self) -> Path:
        """Folder of the copied files."""
        return self.folder / FILES

    def read_entries(self) -> Iterator[FileEntry]:
        """Yield the files in the inventory; raises `SetupError` if it is damaged."""
        return read_inventory(self.folder / INVENTORY)


def complete_backups(folder: Path) -> list[Path]:
    """Return the complete backups below a folder, oldest first; one that was renamed is not among them."""
    return [path for *_, path in sorted(_named_backups(folder)) if (path / MANIFEST).is_file()]


def next_path(folder: Path, created_at: datetime) -> Path:
    """Return the path of a new backup below `folder`, which sorts after those of the same second."""
    name = f"{created_at:%Y-%m-%dT%H%M%SZ}"
    numbers = [number for time, number, _ in _named_backups(folder) if time == name]
    return folder / (f"{name}-{max(numbers) + 1}" if numbers else name)


def _named_backups(folder: Path) -> list[tuple[str, int, Path]]:
    try:
        return [(match[1], int(match[2] or 1), it) for it in folder.iterdir() if (match := _NAME.fullmatch(it.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def open_backup(folder: Path) -> Backup:
    """Open the backup in a folder, or the newest of those below it.

    Raises:
        SetupError: There is no complete backup, or its manifest is damaged or of a later version.
    """
    if not (folder / MANIFEST).is_file():
        complete = complete_backups(folder)
        if not complete:
            unfinished = (folder / UNFINISHED).is_dir() or folder.name == UNFINISHED
            hint = (
                "only an unfinished one, which was interrupted: run `anneal backup` again."
                if unfinished
                else "name the folder that was given to `anneal backup`, or a backup in it."
            )
            raise SetupError(f"{folder} contains no complete backup; {hint}")
        folder = complete[-1]
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except ValidationError as error:
        if error.errors()[0]["loc"] == ("format",):
            raise SetupError(f"{folder} was made by a later version of Anneal: restore it with that version.") from None
        raise SetupError(f"{folder / MANIFEST} is damaged: restore another backup.") from None
    except OSError as error:
        raise SetupError(f"{folder / MANIFEST} cannot be read ({error.strerror}).") from None
    return Backup(folder, manifest)


def write_inventory(path: Path, entries: Iterable[FileEntry]) -> None:
    """Write the inventory."""
    with path.open("w") as file:
        file.writelines(inventory_line(entry) for entry in entries)


def inventory_line(entry: FileEntry) -> str:
    """Return the line of a file in the inventory."""
    return json.dumps(asdict(entry), separators=(",", ":")) + "\n"


def read_inventory(path: Path, *, torn: bool = False) -> Iterator[FileEntry]:
    """Yield the files in an inventory; with `torn`, until the first line that is not whole.

    Raises:
        SetupError: A line is not valid, or names a path outside of the storage.
    """
    try:
        with path.open() as file:
            for line in file:
                try:
                    entry = FileEntry(**json.loads(line))
                    refuse_outside(entry.path)
                except (ValueError, TypeError, OutsideStorage):
                    if torn:
                        return
                    raise SetupError(f"{path} is damaged: restore another backup.") from None
                yield entry
    except OSError as error:
        if not torn:
            raise SetupError(f"{path} cannot be read ({error.strerror}): restore another backup.") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes a folder a backup."""
    write_private(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
