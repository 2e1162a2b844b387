"""`anneal restore`: the database and the storage of a backup, in a service that is stopped.

Nothing is deleted: with `replace`, what was there is moved to a folder, together with a dump of the database.
"""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, func, select, text, update

from app.backup.contents import Contents, find_problems
from app.backup.copying import Copier, EarlierFile, SourceFile
from app.backup.database_client import DatabaseAddress, dump_database, find_client, restore_database
from app.backup.home_database import reserve_database
from app.backup.layout import (
    DUMP,
    INVENTORY,
    MANIFEST,
    SECRET_KEY,
    Backup,
    Described,
    FileEntry,
    Problem,
    file_problem,
    open_backup,
)
from app.backup.progress import Progress
from app.config import Settings
from app.infra.clock import utc_now
from app.infra.db import sync_engine
from app.infra.errors import SetupError
from app.infra.files import unfinished_restore
from app.infra.private_files import make_private_folder, write_private
from app.infra.storage import Storage
from app.secrets.keyring import Keyring, KeyringError
from app.tables import migrate
from app.tables.administration.api_keys import ApiKey
from app.tables.administration.secrets import Secret
from app.tables.base import equals_any
from app.tables.checkpoints import Checkpoint
from app.tables.datasets import Dataset
from app.tables.runs import Run

_FOLDERS = ("datasets", "runs")
"""Folders of the storage that a backup has."""

_TABLES_OF_USERS = {f"public.{model.__tablename__}" for model in (Run, Dataset, ApiKey)}
"""Tables of which one has a row as soon as a service is used."""

_TABLES = text(
    "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE n.nspname = 'public' AND c.relkind IN ('r', 'p') AND NOT c.relispartition"
    " AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'e') ORDER BY 1"
)
_FUNCTIONS = text(
    "SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace"
    " WHERE n.nspname = 'public'"
    " AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e') ORDER BY 1"
)
_SESSIONS = text(
    "SELECT DISTINCT coalesce(nullif(application_name, ''), usename::text) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid() AND usesysid IS NOT NULL ORDER BY 1"
)


@dataclass(frozen=True)
class RestoredBackup:
    """Result of a restore."""

    backup: Backup
    problems: list[Problem]
    """Entries of the database whose files the backup does not have as they were stored."""
    aside: Path | None
    """Folder of what was there before."""
    unreadable_secrets: int
    """Number of secrets that the key file of this machine cannot decrypt."""


class RestoreJob:
    """Restores one backup; one that was interrupted is continued."""

    def __init__(self, settings: Settings, folder: Path, progress: Progress, *, replace: bool = False) -> None:
        self._settings = settings
        self._progress = progress
        self._backup = open_backup(folder.expanduser().absolute())
        mark = unfinished_restore.read_mark(settings) or {}
        self._continues = mark.get("backup") == str(self._backup.folder)
        self._replace = replace or (self._continues and bool(mark.get("replace")))
        parent = unfinished_restore.mark_path(settings).parent
        self._aside = Path(mark["aside"] if self._continues else parent / f"replaced-{utc_now():%Y-%m-%dT%H%M%SZ}")
        self._is_place_empty = self._continues and bool(mark.get("is_place_empty"))
        self._storage = Storage(settings)

    def run(self) -> RestoredBackup:
        """Restore everything and check it.

        Raises:
            SetupError: Something prevents it. If the restore has started, the next call continues it.
        """
        self._check_backup()
        with reserve_database(self._settings, self._progress.say) as url:
            settings = self._settings.model_copy(update={"database_url": url})
            engine = sync_engine(url, pool_size=0, name="anneal-restore", statement_seconds=0)
            try:
                return self._restore_all(settings, engine)
            finally:
                engine.dispose()

    def _check_backup(self) -> None:
        manifest, folder = self._backup.manifest, self._backup.folder
        if manifest.revision > migrate.needed_revision():
            raise SetupError(
                f"{folder} was made by Anneal {manifest.version} (database revision {manifest.revision}), which is "
                f"later than this version (revision {migrate.needed_revision()}): restore it with that version or a "
                "newer one."
            )
        store, original = self._settings.storage_url, manifest.object_store
        if store is not None and original is None:
            raise SetupError(
                f"{folder} has the files of a folder, but ANNEAL_STORAGE is a URL: restore it with a folder as "
                "ANNEAL_STORAGE, then run `anneal storage copy`."
            )
        if store is None and original is not None:
            raise SetupError(
                f"The files of {folder} are in the object store {original}: set ANNEAL_STORAGE to its URL."
            )
        if store != original:
            self._progress.say(f"The files were in {original}: {store} must be a copy of it.")
        with self._progress.step("Checking the backup", manifest.database.bytes) as report:
            for name, described in ((DUMP, manifest.database), (INVENTORY, manifest.inventory)):
                try:
                    is_intact = Described.from_file(folder / name) == described
                except OSError as error:
                    raise SetupError(
                        f"{folder / name} cannot be read ({error.strerror}): restore another backup."
                    ) from None
                if not is_intact:
                    raise SetupError(f"{folder / name} is damaged: restore another backup.")
            report(manifest.database.bytes)

    def _restore_all(self, settings: Settings, engine: Engine) -> RestoredBackup:
        with engine.connect() as connection:
            server_major = int(connection.scalar(text("SHOW server_version_num"))) // 10_000
            self._refuse_use(connection)
            tables = list(connection.scalars(_TABLES))
            has_rows = _has_rows(connection, tables)
            self._refuse_data(has_rows)
            drops = [f"DROP TABLE {', '.join(tables)} CASCADE"] if tables else []
            drops += [f"DROP FUNCTION {function} CASCADE" for function in connection.scalars(_FUNCTIONS)]
        client = find_client(max(server_major, self._backup.manifest.client_major))
        address = DatabaseAddress.from_url(settings.database_url or "")
        files = list(self._backup.read_entries())
        unfinished_restore.mark_path(settings).parent.mkdir(parents=True, exist_ok=True)
        self._check_space(files)
        if not self._is_place_empty:
            self._write_mark()
            if has_rows and not (self._aside / DUMP).exists():
                self._dump_aside(address, server_major)
            self._move_aside()
            self._is_place_empty = True
            self._write_mark()
        restored, damaged = self._copy_files(files)
        with self._progress.step("Restoring the database", None) as report:
            restore_database(address, client, server_major, self._backup.dump, drops, report)
        self._mark_removed(engine)
        migrate.upgrade_schema(settings, self._progress.say)
        problems = damaged + self._find_problems(engine, restored)
        self._restore_secret_key()
        unreadable = self._unreadable_secrets(engine)
        os.sync()
        unfinished_restore.remove_mark(settings)
        return RestoredBackup(self._backup, problems, self._aside if self._aside.exists() else None, unreadable)

    def _refuse_use(self, connection: Connection) -> None:
        sessions = list(connection.scalars(_SESSIONS))
        if sessions:
            raise SetupError(
                f"The database is in use by {', '.join(sessions)}: stop every API and every worker, and restore then."
            )

    def _refuse_data(self, has_rows: bool) -> None:
        if self._replace or self._continues:
            return
        present = ["the database has data of Anneal"] if has_rows else []
        present += [f"{folder} is not empty" for folder in self._folders_with_files()]
        if present:
            raise SetupError(
                f"There is a service here already ({'; '.join(present)}). Set ANNEAL_HOME, ANNEAL_DATABASE_URL or "
                "ANNEAL_STORAGE to empty places, or use --replace, which moves what is there to another folder."
            )

    def _folders_with_files(self) -> list[Path]:
        if self._settings.storage_url is not None:
            return []
        folders = [self._storage.root / name for name in _FOLDERS]
        return [folder for folder in folders if folder.is_dir() and any(folder.iterdir())]

    def _check_space(self, files: list[FileEntry]) -> None:
        if self._settings.storage_url is not None:
            return
        needed = sum(file.bytes for file in files)
        if self._continues:
            needed -= sum(self._storage.root.joinpath(file.path).exists() * file.bytes for file in files)
        free = shutil.disk_usage(self._storage.root).free
        if needed > free:
            raise SetupError(
                f"{self._storage.root} has {free / 1e9:,.1f} GB of free space, but the files of the backup have "
                f"{needed / 1e9:,.1f} GB: make room, or set ANNEAL_STORAGE to a folder on another disk."
            )

    def _write_mark(self) -> None:
        facts = {
            "backup": str(self._backup.folder),
            "replace": self._replace,
            "aside": str(self._aside),
            "is_place_empty": self._is_place_empty,
        }
        unfinished_restore.write_mark(self._settings, facts)

    def _dump_aside(self, address: DatabaseAddress, server_major: int) -> None:
        make_private_folder(self._aside)
        partial = self._aside / f".{DUMP}"
        with self._progress.step("Saving the database that is replaced", None) as report:
            dump_database(address, find_client(server_major), None, partial, report)
        partial.rename(self._aside / DUMP)

    def _move_aside(self) -> None:
        for folder in self._folders_with_files():
            make_private_folder(self._aside)
            try:
                folder.rename(self._aside / folder.name)
            except OSError as error:  # such as the root of a file system
                raise SetupError(
                    f"{folder} cannot be moved to {self._aside} ({error.strerror}): move what is in it yourself, and "
                    "run the command again."
                ) from None

    def _copy_files(self, files: list[FileEntry]) -> tuple[dict[str, FileEntry], list[Problem]]:
        """Return the restored files by path, and those that the backup does not have as they were copied to it."""
        done = 0

        def add_bytes(count: int) -> None:
            nonlocal done
            done += count
            report(done)

        root = self._storage.root
        present = {file.path: EarlierFile(file, root / file.path) for file in files} if self._continues else {}
        copier = Copier(self._backup.files, root, present, add_bytes)
        restored: dict[str, FileEntry] = {}
        damaged: list[Problem] = []
        with self._progress.step("Copying files", sum(file.bytes for file in files)) as report:
            for file in files:
                entry = self._copy_file(copier, root / file.path, file)
                if entry is not None:
                    restored[file.path] = entry
                else:
                    damaged.append(file_problem(file.path, "is missing or damaged in the backup"))
        if damaged and not (self._backup.folder / MANIFEST).exists():
            raise SetupError(f"{self._backup.folder} cannot be read any more: mount it, and run the command again.")
        self._give_to_owner_of_storage(restored)
        return restored, damaged

    def _copy_file(self, copier: Copier, target: Path, file: FileEntry) -> FileEntry | None:
        try:
            is_restored = self._continues and target.stat().st_mtime_ns == file.mtime_ns != 0
        except OSError:
            is_restored = False
        source = SourceFile(file.path, file.bytes, file.mtime_ns if is_restored else -1)
        entry = copier.copy_file(source)
        if entry is None or (entry.bytes, entry.sha256) != (file.bytes, file.sha256):
            with suppress(OSError):  # its path may be too long
                target.unlink(missing_ok=True)
            return None
        target.chmod(file.mode)
        return entry

    def _give_to_owner_of_storage(self, restored: dict[str, FileEntry]) -> None:
        """As root, give everything to the user that owns the storage, who runs the service."""
        root = self._storage.root
        folders = {parent for path in restored for parent in Path(path).parents if parent != Path()}
        self._give_away(root / path for path in [*map(Path, restored), *folders])

    def _give_away(self, paths: Iterable[Path]) -> None:
        if os.geteuid() != 0 or not self._storage.root.exists():
            return
        owner = self._storage.root.stat()
        for path in paths:
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)

    def _mark_removed(self, engine: Engine) -> None:
        """Mark checkpoints as deleted that were deleted while the backup was made."""
        removed = [problem.id for problem in self._backup.manifest.removed if problem.kind == "checkpoint"]
        if removed:
            with engine.begin() as connection:
                is_removed = equals_any(Checkpoint.id, removed) & Checkpoint.deleted_at.is_(None)
                connection.execute(update(Checkpoint).where(is_removed).values(deleted_at=func.now()))

    def _find_problems(self, engine: Engine, restored: dict[str, FileEntry]) -> list[Problem]:
        if self._settings.storage_url is not None:
            return []
        root = self._storage.root
        with engine.connect() as connection:
            contents = Contents.from_database(connection)
        # Without the connection, since many manifests take longer to read than a transaction may be idle.
        return list(find_problems(contents, restored, self._storage, lambda path: (root / path).read_bytes()))

    def _restore_secret_key(self) -> None:
        path, copy = self._settings.secret_key_path, self._backup.folder / SECRET_KEY
        if copy.exists() and not path.exists():
            make_private_folder(path.parent)
            write_private(path, copy.read_text())
            self._give_away([path])

    def _unreadable_secrets(self, engine: Engine) -> int:
        with engine.connect() as connection:
            secrets = connection.execute(select(Secret.name, Secret.key_id, Secret.sealed)).all()
        if not secrets:
            return 0
        try:
            keyring = Keyring.from_settings(self._settings)
        except KeyringError:
            return len(secrets)
        return sum(not _is_readable(keyring, secret.name, secret.key_id, secret.sealed) for secret in secrets)


def _has_rows(connection: Connection, tables: list[str]) -> bool:
    """Return True if the database has more than the empty tables of `anneal migrate`.

    Raises:
        SetupError: It has tables of another program, which are never replaced.
    """
    if tables and "public.alembic_version" not in tables:
        raise SetupError(
            f"The database has tables of another program ({', '.join(tables[:3])}): set ANNEAL_DATABASE_URL to a "
            "database of its own."
        )
    filled = (f"EXISTS (SELECT FROM {table})" for table in tables if table in _TABLES_OF_USERS)
    return bool(tables) and bool(connection.scalar(text(f"SELECT {' OR '.join(filled) or 'true'}")))


def _is_readable(keyring: Keyring, name: str, key_id: str, sealed: bytes) -> bool:
    try:
        keyring.open_sealed(name, key_id, sealed)
    except KeyringError:
        return False
    return True
