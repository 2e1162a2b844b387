"""Working copy of an object store on this machine: datasets and attempts, fetched when a run needs them.

An entry is the folder of a dataset or of an attempt. Each has a lock file: a run that uses the entry holds it shared
until its attempt ends, and a process that removes the entry holds it exclusively. Workers of a machine may share the
folder. The time of a lock file is that of the last use.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError

from anneal.contracts.run_status import TERMINAL
from app.infra.async_tasks import skipping_errors
from app.infra.files.object_store import StoreUnavailable
from app.infra.files.tree import bytes_below, remove_tree
from app.infra.storage import Storage
from app.runs.state.checkpoints import uploads
from app.tables.administration.installation import Installation
from app.tables.checkpoints import Checkpoint
from app.tables.datasets import Dataset
from app.tables.runs import Run
from worker.checkpoint_files.disk_space import DiskSpace
from worker.checkpoint_files.manifest import find_differences
from worker.checkpoint_store.remote_store import RemoteStore

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 0.1
_TRIES = 3
_PAUSE_SECONDS = 1.0
_LEFT_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class _Entry:
    folder: Path
    bytes: int
    used_at: float


class WorkingCopy:
    """Bounded cache of what runs of this machine use. Every method may be called from any thread."""

    def __init__(
        self, remote: RemoteStore, storage: Storage, engine: Engine, limit_bytes: int, reserve_bytes: int
    ) -> None:
        self.remote = remote
        self._storage = storage
        self._engine = engine
        self._limit = limit_bytes
        self._disk_space = DiskSpace(storage.root, reserve_bytes)
        self._users: dict[str, ExitStack] = {}
        self._trimming = threading.Lock()
        self._make_folders()

    def _make_folders(self) -> None:
        """Make the folders of entries: an operator may remove the working copy while this worker runs."""
        for folder in ("datasets", "runs", "locks"):
            (self._storage.root / folder).mkdir(parents=True, exist_ok=True)

    def check_store(self) -> None:
        """Check that the object store answers, and is the one that the API uses with this database.

        Raises:
            WrongStore, StoreUnavailable: It is not.
        """
        with self._engine.connect() as connection:
            installation = connection.scalar(select(Installation.id))
        self.remote.objects.check_owner(installation)

    @contextmanager
    def used_by(self, run_id: str) -> Iterator[None]:
        """Keep what is used for a run from being removed, for the duration of the block; make room afterwards."""
        try:
            with ExitStack() as held:
                self._users[run_id] = held
                yield
        finally:
            if self._users.get(run_id) is held:  # else a later attempt of the same run is on this worker already
                del self._users[run_id]
            try:
                self.make_room()
            except (OSError, SQLAlchemyError) as error:
                log.warning("the working copy %s could not be tidied: %s", self._storage.root, error)

    def use_entry(self, run_id: str, folder: Path, check: Callable[[], None]) -> None:
        """Keep an entry for a run; it need not exist yet. `check` raises to end the wait for another process."""
        self._make_folders()
        self._users[run_id].enter_context(_hold_lock(self._lock_file(folder), fcntl.LOCK_SH, check))

    @contextmanager
    def fetch_lock(self, folder: Path, check: Callable[[], None]) -> Iterator[None]:
        """Let no other thread or process fetch the same folder, for the duration of the block."""
        path = self._lock_file(folder)
        path = path.with_name(f"{path.name}.fetch")
        with _hold_lock(path, fcntl.LOCK_EX, check):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # who waits for it notices

    def fetch_dataset(self, run_id: str, path: Path, size: int, sha256: str, check: Callable[[], None]) -> None:
        """Fetch the file of a dataset for a run, unless it is here as it was stored.

        Raises:
            MissingInStore, CorruptInStore, StoreUnavailable: See these.
            OSError: There is no space for it here.
        """
        folder = path.parent
        self.use_entry(run_id, folder, check)
        with self.fetch_lock(folder, check):
            if folder.is_dir() and not find_differences(folder, {path.name: (size, sha256)}, check):
                return
            self._make_room(size, path.name)
            staging = self._storage.root / "staging" / uuid4().hex
            self._retry_fetch(lambda: self.remote.fetch_file(path, size, sha256, staging, check), check)

    def fetch_output(
        self, run_id: str, owner: tuple[str, int], sha256: str, own_name: str, check: Callable[[], None]
    ) -> Path:
        """Fetch the output of an attempt, `of` a run and its number, as `dataset` does; return its folder."""
        folder, described = self._storage.output_dir(*owner), self._storage.output_manifest(*owner)
        self.use_entry(run_id, folder.parent, check)
        with self.fetch_lock(folder, check):
            files = self._retry_fetch(lambda: self.remote.described_files(described, sha256), check)
            if not folder.is_dir() or folder.is_symlink() or find_differences(folder, files, check):
                self._make_room(sum(size for size, _ in files.values()), "the output")
                folder.parent.parent.mkdir(exist_ok=True)
                self._retry_fetch(
                    lambda: self.remote.fetch_described(folder, described, sha256, f"{own_name}.{run_id}", check),
                    check,
                )
        return folder

    def make_room(self, incoming_bytes: int = 0) -> None:
        """Remove entries that no run uses: those of deleted runs and datasets, then the least recently used ones.

        Stops once `incoming_bytes` more fit below the limit and on the disk. An attempt with a checkpoint that is still
        to be sent is kept.
        """
        with self._trimming:
            self._make_folders()
            self._remove_leftovers()
            entries = sorted(self._list_entries(), key=lambda entry: entry.used_at)
            total = sum(one.bytes for one in entries)
            deleted, unsent = self._deleted_entries(entries), self._unsent_attempts(entries)
            for entry in sorted(entries, key=lambda other: (other.folder not in deleted, other.used_at)):
                is_over = total + incoming_bytes > self._limit or self._disk_space.shortage_reason(incoming_bytes)
                if entry.folder in deleted or (is_over and entry.folder not in unsent):
                    with skipping_errors(log, "cannot remove %s from the working copy", entry.folder):
                        total -= entry.bytes if self._remove_entry(entry.folder) else 0
            self._remove_run_folders()
            self._remove_locks()

    def _remove_run_folders(self) -> None:
        """Remove the folders without attempts of runs that have ended or were deleted: their journal and lock."""
        empty = {folder.name: folder for folder in self._storage.runs.glob("*") if not any(folder.glob("a*"))}
        with self._engine.connect() as connection:
            live = set(connection.scalars(select(Run.id).where(Run.id.in_(empty), Run.status.not_in(TERMINAL))))
        for folder in (empty[id] for id in empty.keys() - live):
            with suppress(OSError):  # something is fetched into it meanwhile, or it is no folder of a run
                for name in (self._storage.journal_path(folder.name).name, "trainer.lock"):
                    (folder / name).unlink(missing_ok=True)
                folder.rmdir()

    def _remove_locks(self) -> None:
        """Remove the lock files of entries that are no longer here."""
        for path in (self._storage.root / "locks").iterdir():
            entry = self._storage.root / path.name.removesuffix(".fetch").replace(".", "/")
            with suppress(OSError):  # in use, or gone
                if not entry.exists() and time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                    with _hold_lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB, lambda: None):
                        path.unlink()

    def _make_room(self, size: int, what: str) -> None:
        self.make_room(size)
        if lacking := self._disk_space.shortage_reason(size):
            raise OSError(errno.ENOSPC, f"{what} does not fit on the disk: {lacking}")

    def _retry_fetch(self, fetch: Callable[[], T], check: Callable[[], None]) -> T:
        for tries in range(1, _TRIES + 1):
            check()
            try:
                return fetch()
            except StoreUnavailable:
                if tries == _TRIES:
                    raise
                time.sleep(_PAUSE_SECONDS * tries)
        raise AssertionError("unreachable")

    def _list_entries(self) -> Iterator[_Entry]:
        datasets = self._storage.root / "datasets"
        for folder in [*datasets.iterdir(), *self._storage.runs.glob("*/a*")]:
            if folder.is_dir() and not folder.is_symlink():
                with suppress(FileNotFoundError):  # removed by another process
                    yield _Entry(folder, bytes_below(folder), self._used_at(folder))

    def _used_at(self, folder: Path) -> float:
        try:
            return self._lock_file(folder).stat().st_mtime
        except FileNotFoundError:
            return folder.stat().st_mtime

    def _deleted_entries(self, entries: Sequence[_Entry]) -> set[Path]:
        """Return the entries whose run or dataset is not in the database."""
        names = {one.folder: _owner_id(one.folder) for one in entries}
        ids = set(names.values())
        with self._engine.connect() as connection:
            known = set(connection.scalars(select(Run.id).where(Run.id.in_(ids))))
            known |= set(connection.scalars(select(Dataset.id).where(Dataset.id.in_(ids))))
        return {folder for folder, id in names.items() if id not in known}

    def _unsent_attempts(self, entries: Sequence[_Entry]) -> set[Path]:
        """Return the attempts with a checkpoint that a worker is still to send."""
        query = select(Checkpoint.run_id, Checkpoint.attempt)
        ids = {_owner_id(one.folder) for one in entries}
        with self._engine.connect() as connection:
            rows = connection.execute(query.where(Checkpoint.run_id.in_(ids), uploads.is_to_be_sent())).all()
        return {self._storage.attempt_dir(run_id, attempt) for run_id, attempt in rows}

    def _remove_leftovers(self) -> None:
        """Remove what killed processes left half fetched or half removed."""
        self._storage.sweep_staging(_LEFT_SECONDS)
        for folder in self._storage.runs.glob("*/.fetch-*"):
            with skipping_errors(log, "cannot remove %s", folder), suppress(FileNotFoundError):
                if time.time() - folder.stat().st_mtime > _LEFT_SECONDS:
                    remove_tree(folder, ignore_errors=True)

    def _remove_entry(self, folder: Path) -> bool:
        """Remove an entry unless it is in use; return True if it is gone."""
        path = self._lock_file(folder)
        try:
            with _hold_lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB, lambda: None):
                going = self._storage.root / "staging" / uuid4().hex
                going.parent.mkdir(exist_ok=True)
                folder.rename(going)
                path.unlink()
        except (BlockingIOError, FileNotFoundError):
            return False
        remove_tree(going, ignore_errors=True)
        log.info("removed %s from the working copy", folder)
        return True

    def _lock_file(self, folder: Path) -> Path:
        return self._storage.root / "locks" / self._storage.key_of(folder).replace("/", ".")


@contextmanager
def _hold_lock(path: Path, how: int, check: Callable[[], None]) -> Iterator[None]:
    """Hold a lock on a file that its exclusive holder may remove; raise BlockingIOError with LOCK_NB."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, how | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if how & fcntl.LOCK_NB:
                        raise
                    check()
                    time.sleep(_POLL_SECONDS)
            if _is_at(path, descriptor):
                os.utime(descriptor)
                yield
                return
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _owner_id(folder: Path) -> str:
    """Return the id of the dataset or run of an entry."""
    return folder.name if folder.parent.name == "datasets" else folder.parent.name
