"""`anneal backup`: adds a backup of the database and the storage to a folder, while the service runs.

The database is dumped first. A file exists before a row names it, so a copy of the files that is made later has each
file of the dump, except what was deleted in between.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from sqlalchemy import func, select, text

from app.backup import layout
from app.backup.contents import Contents, find_problems, is_listed, open_snapshot
from app.backup.copying import Copier, CopyCounts, EarlierFile, remove_others, stored_files
from app.backup.database_client import DatabaseAddress, dump_database, find_client
from app.backup.home_database import open_database
from app.backup.layout import Backup, Described, FileEntry, Manifest, Problem
from app.backup.progress import Progress
from app.config import Settings
from app.infra.clock import utc_now
from app.infra.errors import SetupError
from app.infra.files.tree import remove_tree
from app.infra.private_files import make_private_folder, write_private
from app.infra.storage import Storage, fsync_path
from app.tables.administration.secrets import Secret

_SPARE_BYTES = 64 * 2**20
"""Space that must be left on the disk of the backup."""


@dataclass(frozen=True)
class CreatedBackup:
    """Complete backup, and what was done for it."""

    backup: Backup
    counts: CopyCounts
    secrets: int
    """Number of secrets in the database, which need the key file."""
    has_secret_key: bool
    deleted: list[Path]
    """Older backups that were deleted."""


@dataclass(frozen=True)
class _Dumped:
    contents: Contents
    client_major: int
    secrets: int


class BackupJob:
    """Adds one backup to `folder`; one that was interrupted is continued with what it has already copied."""

    def __init__(self, settings: Settings, folder: Path, progress: Progress, *, with_secret_key: bool = False) -> None:
        self._settings = settings
        self._folder = folder.expanduser().absolute()
        self._progress = progress
        self._with_secret_key = with_secret_key
        self._unfinished = self._folder / layout.UNFINISHED
        # Without the object store: what is there is not copied.
        self._storage = Storage(settings)

    def run(self, keep: int | None = None) -> CreatedBackup:
        """Make the backup; then delete all but the newest `keep` complete ones, and the newest without problems.

        Raises:
            SetupError: Something prevents it; the next call continues.
        """
        self._check_folder()
        with _lock_folder(self._folder):
            make_private_folder(self._unfinished)
            with open_database(self._settings, self._progress.say) as url:
                dumped = self._dump_database(url)
                files, counts = self._copy_files(dumped.contents)
                removed, problems = self._find_problems(url, dumped.contents, files)
                problems += [layout.file_problem(path, reason) for path, reason in counts.unreadable.items()]
            has_secret_key = self._copy_secret_key()
            layout.write_inventory(self._unfinished / layout.INVENTORY, files.values())
            os.sync()
            manifest = Manifest(
                created_at=utc_now(),
                version=version("anneal"),
                revision=dumped.contents.revision,
                client_major=dumped.client_major,
                database=Described.from_file(self._unfinished / layout.DUMP),
                inventory=Described.from_file(self._unfinished / layout.INVENTORY),
                files=len(files),
                file_bytes=sum(file.bytes for file in files.values()),
                object_store=self._settings.storage_url,
                removed=removed,
                problems=problems,
            )
            layout.write_manifest(self._unfinished, manifest)
            backup = Backup(self._name_finished(manifest), manifest)
            deleted = [] if keep is None else self._delete_old(keep, backup.folder)
            return CreatedBackup(backup, counts, dumped.secrets, has_secret_key, deleted)

    def _check_folder(self) -> None:
        folder, root = Path(os.path.realpath(self._folder)), Path(os.path.realpath(self._storage.root))
        if folder == root or root in folder.parents or folder in root.parents:
            raise SetupError(f"{self._folder} overlaps the storage {self._storage.root}: name another folder.")
        if (self._folder / layout.MANIFEST).exists():
            raise SetupError(f"{self._folder} is a backup itself: name the folder above it, to which another is added.")
        try:
            make_private_folder(self._folder)
        except SetupError as error:
            raise SetupError(str(error).partition(";")[0] + ": name a folder that you can write to.") from None
        if not os.access(self._folder, os.W_OK):
            raise SetupError(f"You cannot write to {self._folder}: name another folder, or change its owner.")

    def _dump_database(self, url: str) -> _Dumped:
        with open_snapshot(url) as connection:
            contents = Contents.from_database(connection)
            secrets = connection.scalar(select(func.count()).select_from(Secret)) or 0
            server_major = int(connection.scalar(text("SHOW server_version_num"))) // 10_000
            client = find_client(server_major)
            exported = str(connection.scalar(text("SELECT pg_export_snapshot()")))
            with self._progress.step("Dumping the database", None) as report:
                dump_database(DatabaseAddress.from_url(url), client, exported, self._unfinished / layout.DUMP, report)
        return _Dumped(contents, client.major, secrets)

    def _copy_files(self, contents: Contents) -> tuple[dict[str, FileEntry], CopyCounts]:
        if self._settings.storage_url is not None:
            remove_others(self._unfinished / layout.FILES, set())
            return {}, CopyCounts()
        copies = self._unfinished / layout.FILES
        copies.mkdir(mode=0o700, exist_ok=True)
        done = 0

        def add_bytes(count: int) -> None:
            nonlocal done
            done += count
            report(done)

        copier = Copier(self._storage.root, copies, self._earlier_files(), add_bytes)
        sources = list(stored_files(self._storage.root, contents, copier.counts.unreadable))
        _check_space(self._folder, sum(file.bytes for file in sources if not copier.is_reusable(file)))
        files: dict[str, FileEntry] = {}
        with (
            self._progress.step("Copying files", sum(file.bytes for file in sources)) as report,
            (self._unfinished / layout.INVENTORY).open("a", buffering=1) as inventory,
        ):
            for source in sources:
                if (entry := copier.copy_file(source)) is not None:
                    files[entry.path] = entry
                    inventory.write(layout.inventory_line(entry))
        remove_others(copies, set(files))
        return files, copier.counts

    def _earlier_files(self) -> dict[str, EarlierFile]:
        """Return the files of the newest complete backup, and above them those of one that was interrupted."""
        folders = [*layout.complete_backups(self._folder)[-1:], self._unfinished]
        return {
            entry.path: EarlierFile(entry, folder / layout.FILES / entry.path)
            for folder in folders
            for entry in layout.read_inventory(folder / layout.INVENTORY, torn=True)
        }

    def _find_problems(
        self, url: str, contents: Contents, files: dict[str, FileEntry]
    ) -> tuple[list[Problem], list[Problem]]:
        """Return what was deleted since the dump, and what is missing or corrupt."""
        if self._settings.storage_url is not None:
            return [], []
        copies = self._unfinished / layout.FILES
        candidates = list(find_problems(contents, files, self._storage, lambda path: (copies / path).read_bytes()))
        if not candidates:
            return [], []
        with open_snapshot(url) as connection:
            problems = [problem for problem in candidates if is_listed(connection, problem)]
        return [problem for problem in candidates if problem not in problems], problems

    def _delete_old(self, keep: int, latest: Path) -> list[Path]:
        backups = layout.complete_backups(self._folder)
        # A storage that is not mounted, or fails, must not cost the last backup of what was in it.
        without_problems = [path for path in backups if _has_no_problems(path)]
        remaining = {latest, *backups[-keep:], *without_problems[-1:]}
        deleted = [path for path in backups if path not in remaining]
        for path in deleted:
            # Without its manifest first: one that is half deleted is none.
            (path / layout.MANIFEST).unlink()
            remove_tree(path)
        return deleted

    def _copy_secret_key(self) -> bool:
        copy = self._unfinished / layout.SECRET_KEY
        copy.unlink(missing_ok=True)
        if not self._with_secret_key:
            return False
        path = self._settings.secret_key_path
        try:
            write_private(copy, path.read_text())
        except FileNotFoundError:
            return False  # no secret was ever stored
        except OSError as error:
            raise SetupError(f"The key file {path} cannot be read ({error.strerror}).") from None
        return True

    def _name_finished(self, manifest: Manifest) -> Path:
        final = layout.next_path(self._folder, manifest.created_at)
        self._unfinished.rename(final)
        fsync_path(self._folder)
        return final


def _has_no_problems(folder: Path) -> bool:
    try:
        return not layout.open_backup(folder).manifest.problems
    except SetupError:
        return False  # its manifest cannot be read


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES > free:
        raise SetupError(
            f"{folder} has {free / 1e9:,.1f} GB of free space, but the backup needs {needed / 1e9:,.1f} GB: "
            "make room, or name a folder on another disk."
        )


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Allow one backup at a time in a folder."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SetupError(f"Another `anneal backup` writes to {folder}: wait for its end.") from None
    try:
        yield
    finally:
        os.close(descriptor)
