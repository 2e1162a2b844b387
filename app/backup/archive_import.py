"""`anneal import`: adds what an archive has and the service does not have, all of it or nothing."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select, text, update
from sqlalchemy.exc import DataError, IntegrityError, OperationalError

from anneal.contracts.run_status import TERMINAL
from app.backup.archive import ArchiveReader
from app.backup.contents import Contents, find_problems
from app.backup.home_database import open_database
from app.backup.layout import FileEntry, Problem
from app.backup.progress import Progress
from app.backup.shown_values import invalid_column
from app.backup.tables import DATASETS, EVENTS, EXPERIMENTS, KEYS, RUNS, TABLES, ArchivedTable
from app.config import Settings
from app.datasets.service import EXTENSION
from app.infra.clock import utc_now
from app.infra.db import sync_engine
from app.infra.errors import SetupError
from app.infra.files.disk_space import DatabaseReserve
from app.infra.files.tree import remove_tree
from app.infra.files.untrusted_folder import create_below
from app.infra.ids import id_at, is_id
from app.infra.storage import Storage
from app.tables import migrate
from app.tables.base import equals_any
from app.tables.runs import Attempt, RunDeletion
from app.tables.usage import DeletedAttempt

_PREFIXES = {KEYS: "key", EXPERIMENTS: "exp", DATASETS: "ds", RUNS: "run"}
_IDENTITY = {
    KEYS: ("digest",),
    EXPERIMENTS: (),  # every service has one with the same id for runs of none
    DATASETS: ("sha256", "bytes", "created_at"),
    RUNS: ("created_at", "config", "status", "dataset_id", "attempt", "event_seq"),
}
"""Columns that never change once a row has the form that is exported: rows that differ in them are not the same."""
_RESET: dict[str, tuple[str, ...]] = {
    "checkpoints": ("replica_started_at", "replicated_at"),
    "run_attempts": ("is_counted",),
}
"""Columns that are not imported: what they say is true only in the service that wrote them."""
_IS_DELETED = (DeletedAttempt.run_id == Attempt.run_id) & (DeletedAttempt.attempt == Attempt.attempt)
_MARK_COUNTED = update(Attempt).where(~Attempt.is_counted, _IS_DELETED).values(is_counted=True)
"""Lets usage count the attempts of runs that were deleted here and are imported again as those of the deleted runs."""
_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")
_MAX_DEPTH = 32
_BATCH_ROWS = 1000
_BATCH_BYTES = 1 << 22
_MOST_NAMED = 5
_DATABASE_FACTOR = 3
"""Bytes that the database needs for each byte of rows: for tables and indexes, and again for its log."""


@dataclass
class ImportedArchive:
    """Result of an import."""

    added: dict[str, int] = field(default_factory=dict)
    """Number by table of what was added: keys, experiments, datasets and runs."""
    present: dict[str, int] = field(default_factory=dict)
    """Number of those that were there already."""
    skipped_keys: int = 0
    """Number of API keys in the archive that were not asked for."""
    files: int = 0
    problems: list[Problem] = field(default_factory=list)
    """Imported rows whose files the archive lacks, or has with other contents than were stored."""


class ImportJob:
    """Imports one archive."""

    def __init__(self, settings: Settings, path: Path, progress: Progress, *, with_keys: bool = False) -> None:
        self._settings = settings
        self._path = path.expanduser().absolute()
        self._progress = progress
        self._with_keys = with_keys
        self._storage = Storage(settings)
        self._new: dict[ArchivedTable, set[str]] = {}
        self._ids: dict[ArchivedTable, set[str]] = {}
        self._result = ImportedArchive()

    def run(self) -> ImportedArchive:
        """Import what is new.

        Raises:
            SetupError: The archive is damaged or of a later version, or contradicts what is here; nothing is changed.
        """
        if self._settings.storage_url is not None:
            raise SetupError(
                f"The files of this service are in {self._settings.storage_url}: import with a folder as "
                "ANNEAL_STORAGE, then run `anneal storage copy`."
            )
        self._archive = ArchiveReader(self._path)
        try:
            self._check_version()
            with open_database(self._settings, self._progress.say) as url:
                self._database_reserve = DatabaseReserve.for_home(self._settings.home, url)
                engine = sync_engine(url, pool_size=0, name="anneal-import", statement_seconds=0)
                try:
                    with engine.connect() as connection:
                        connection.execute(text("SET idle_in_transaction_session_timeout = 0"))
                        self._import_new(connection)
                except (IntegrityError, DataError) as error:
                    reason = str(error.orig).partition("\n")[0]
                    raise SetupError(f"{self._path} contradicts itself or this service: {reason}.") from None
                finally:
                    engine.dispose()
        finally:
            self._archive.close()
        return self._result

    def _check_version(self) -> None:
        manifest = self._archive.manifest
        if manifest.revision > migrate.needed_revision():
            raise SetupError(
                f"{self._path} was made by Anneal {manifest.version} (database revision {manifest.revision}), which is "
                f"later than this version (revision {migrate.needed_revision()}): import it with that version or a "
                "newer one."
            )
        for table in TABLES:
            described = manifest.tables.get(table.name)
            columns = [] if described is None else described.columns
            if described is None or not set(columns) <= set(table.columns) or len(set(columns)) < len(columns):
                raise self._archive.damaged_error(f"its table {table.name} has other columns")

    def _import_new(self, connection: Connection) -> None:
        if (error := migrate.schema_error(migrate.current_revision(connection))) is not None:
            raise SetupError(error)
        with self._progress.step("Reading the archive", None):
            self._find_new(connection)
        if not any(self._new.values()):
            return
        promoted: list[Path] = []
        try:
            with self._storage.staging_folder() as folder:
                files = self._copy_files(folder)
                with self._progress.step("Writing to the database", None):
                    for table in TABLES:
                        self._insert_rows(connection, table)
                    connection.execute(_MARK_COUNTED)
                    self._check_events(connection)
                contents = Contents.from_database(connection, self._new[RUNS], self._new[DATASETS])
                self._result.problems += find_problems(
                    contents, files, self._storage, lambda path: (folder / "files" / path).read_bytes()
                )
                for source, target in self._new_folders(folder / "files"):
                    remove_tree(target, ignore_errors=True)  # of an import that was killed: the database has none
                    promoted.append(target)
                    self._storage.promote_staged(source, target)
        except BaseException:
            for target in promoted:
                remove_tree(target, ignore_errors=True)
            raise
        try:
            connection.commit()
        except OperationalError as lost:  # it may have succeeded, so the files stay
            reason = str(lost.orig).partition("\n")[0]
            raise SetupError(
                f"The database stopped answering at the end of the import ({reason}): import again, which adds what is "
                "not there."
            ) from None

    def _find_new(self, connection: Connection) -> None:
        conflicts: list[str] = []
        for table, prefix in _PREFIXES.items():
            if table is KEYS and not self._with_keys:
                self._result.skipped_keys = self._archive.manifest.tables[KEYS.name].rows
                self._new[table] = set()
                continue
            archived = {row["id"]: row for row in self._checked_rows(table, prefix)}
            stored = {
                row["id"]: row for row in map(json.loads, table.read_rows(connection, archived.keys())) if archived
            }
            conflicts += [
                f"{id} ({table.name})"
                for id, row in stored.items()
                if any(row[name] != archived[id].get(name) for name in _IDENTITY[table])
            ]
            self._ids[table] = set(archived)
            self._new[table] = archived.keys() - stored.keys()
            self._result.added[table.name] = len(self._new[table])
            self._result.present[table.name] = len(stored)
        if conflicts:
            named = ", ".join(conflicts[:_MOST_NAMED])
            raise SetupError(
                f"{len(conflicts)} ids of the archive belong to something else in this service, or have changed there: "
                f"{named}. Nothing was imported: export without them (`--run`, `--experiment`), or delete them here."
            )
        deleting = select(RunDeletion.run_id).where(equals_any(RunDeletion.run_id, self._new[RUNS]))
        if deleted := list(connection.scalars(deleting)):
            raise SetupError(
                f"{deleted[0]} was deleted here, and its files are still being removed: import again in a few minutes."
            )

    def _checked_rows(self, table: ArchivedTable, prefix: str) -> Iterator[dict[str, Any]]:
        # Partitions of later months must not find rows of theirs.
        latest = id_at(prefix, utc_now() + timedelta(days=1))
        for row in self._parse_rows(table):
            id = row["id"]
            if not isinstance(id, str) or not is_id(id, prefix):
                raise self._archive.damaged_error(f"{str(id)[:80]!r} is no id")
            if table is DATASETS and row.get("extension") != EXTENSION:
                raise self._archive.damaged_error(f"the dataset {id} has another file type")
            if table is RUNS and row.get("status") not in TERMINAL:
                raise self._archive.damaged_error(f"the run {id} has not ended")
            if id > latest:
                raise SetupError(f"{id} was created later than now: correct the clock of this machine.")
            yield row

    def _parse_rows(self, table: ArchivedTable) -> Iterator[dict[str, Any]]:
        columns = set(self._archive.manifest.tables[table.name].columns)
        for line in self._archive.read_rows(table.name):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict) or row.keys() != columns or not isinstance(row.get(table.owner), str):
                raise self._archive.damaged_error(f"a row of {table.name} is not valid")
            yield row

    def _insert_rows(self, connection: Connection, table: ArchivedTable) -> None:
        reset = _RESET.get(table.name, ())
        columns = [name for name in self._archive.manifest.tables[table.name].columns if name not in reset]
        names = ", ".join(f'"{name}"' for name in columns)
        statement = text(
            f'INSERT INTO "{table.name}" ({names}) SELECT {names}'
            f' FROM json_populate_recordset(NULL::"{table.name}", CAST(:rows AS json))'
        )
        # One statement, since a run may refer to one that follows.
        batches = [list(self._new_rows(table))] if table is RUNS else _batch_rows(self._new_rows(table))
        for batch in batches:
            connection.execute(statement, {"rows": f"[{','.join(batch)}]"})

    def _new_rows(self, table: ArchivedTable) -> Iterator[str]:
        is_own = table in _PREFIXES
        new, known = self._new[table if is_own else RUNS], self._ids.get(table if is_own else RUNS, set())
        for row in self._parse_rows(table):
            owner = row[table.owner]
            if owner in new:
                if table.name == "checkpoints" and _CHECKPOINT.fullmatch(str(row.get("name"))) is None:
                    raise self._archive.damaged_error(f"a checkpoint of {owner} has another name")
                if (column := invalid_column(table.name, row)) is not None:
                    raise self._archive.damaged_error(f"{column} of a row of {table.name} is not valid")
                yield json.dumps(row, separators=(",", ":"))
            elif owner not in known and table is not KEYS:
                raise self._archive.damaged_error(f"a row of {table.name} belongs to no run of it")

    def _check_events(self, connection: Connection) -> None:
        query = text(
            "SELECT r.id FROM runs r WHERE r.id = ANY(:ids) AND r.event_seq - r.first_seq + 1 <>"
            " (SELECT count(*) FROM run_events e WHERE e.run_id = r.id AND e.seq BETWEEN r.first_seq AND r.event_seq)"
        )
        if (id := connection.scalar(query, {"ids": sorted(self._new[RUNS])})) is not None:
            raise self._archive.damaged_error(f"events of {id} are missing in {EVENTS.name}")

    def _copy_files(self, folder: Path) -> dict[str, FileEntry]:
        """Copy the files of what is new to `folder/files`, and verify them."""
        selected = [entry for entry, _ in self._archive.read_files() if self._is_new(entry.path)]
        needed = sum(entry.bytes for entry in selected)
        free = shutil.disk_usage(self._storage.root).free - self._settings.disk_reserve_bytes
        if needed > free:
            raise SetupError(
                f"{self._storage.root} has {max(free, 0) / 1e9:,.1f} GB of space beside ANNEAL_DISK_RESERVE_BYTES, but "
                f"the files have {needed / 1e9:,.1f} GB: make room, or export fewer runs."
            )
        self._check_database_room(needed)
        root = folder / "files"
        root.mkdir()
        files: dict[str, FileEntry] = {}
        done = 0
        with self._progress.step("Copying files", needed) as report:
            for entry, pieces in self._archive.read_files():
                if not self._is_new(entry.path):
                    continue
                try:
                    descriptor = create_below(root, entry.path)
                except OSError as error:  # its path exists, or is too long
                    raise self._archive.damaged_error(f"{entry.path[:200]!r}: {error.strerror}") from None
                with os.fdopen(descriptor, "wb") as file:
                    for piece in pieces:
                        file.write(piece)
                        done += len(piece)
                        report(done)
                    os.fchmod(file.fileno(), entry.mode & 0o755)
                os.utime(root / entry.path, ns=(entry.mtime_ns, entry.mtime_ns))
                files[entry.path] = entry
        self._result.files = len(files)
        self._give_to_owner_of_storage(root)
        os.sync()
        return files

    def _check_database_room(self, file_bytes: int) -> None:
        """Raise `SetupError` if the disk of the embedded database is too small for the rows, and the files if on it."""
        if self._database_reserve is None:
            return
        row_bytes = _DATABASE_FACTOR * self._archive.row_bytes
        is_same_disk = self._storage.root.stat().st_dev == self._settings.home.stat().st_dev
        least_bytes = self._settings.disk_reserve_bytes + row_bytes + (file_bytes if is_same_disk else 0)
        if shortage := self._database_reserve.describe_shortage(least_bytes):
            raise SetupError(
                f"Nothing was imported, because {shortage}, and the rows need up to {row_bytes / 1e9:,.1f} GB there: "
                "make room, or export fewer runs."
            )

    def _is_new(self, path: str) -> bool:
        kind, *below = path.split("/")
        table = {"datasets": DATASETS, "runs": RUNS}.get(kind)
        if table is None or not 2 <= len(below) <= _MAX_DEPTH or below[0] not in self._ids[table]:
            raise self._archive.damaged_error(f"{path[:200]!r} belongs to no run or dataset of it")
        return below[0] in self._new[table]

    def _new_folders(self, root: Path) -> Iterator[tuple[Path, Path]]:
        """Yield the folder of each new dataset and run that has files, and its place in the storage."""
        for kind in ("datasets", "runs"):
            for source in sorted((root / kind).glob("*")):
                yield source, self._storage.root / kind / source.name

    def _give_to_owner_of_storage(self, root: Path) -> None:
        """As root, give everything to the user that owns the storage, who runs the service."""
        if os.geteuid() != 0:
            return
        owner = self._storage.root.stat()
        for path in (root, *root.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _batch_rows(rows: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row)
        if len(batch) >= _BATCH_ROWS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
