"""Copies the storage of a stopped service from a folder to an object store: `anneal storage copy`."""

import hashlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Executable, func, select, update

from anneal.contracts.attempt.records import is_record
from app.config import Settings, get_settings
from app.infra.db import sync_engine
from app.infra.errors import SetupError
from app.infra.files import file_manifest
from app.infra.files.object_store import PIECE_BYTES, ObjectMissing, StoreUnavailable, WrongStore
from app.infra.files.untrusted_folder import entries_below
from app.infra.logs import log_setup
from app.infra.server_urls import resolve_urls
from app.infra.storage import Storage
from app.tables.administration.installation import Installation, register_installation
from app.tables.checkpoints import Checkpoint
from app.tables.datasets import Dataset, files_of
from app.tables.runs import Attempt, Run
from app.tables.workers import Worker
from app.workers.queries import is_fresh
from worker.checkpoint_store.remote_store import LocalCheckpointCorrupt, LocalCheckpointMissing, RemoteStore

log = logging.getLogger(__name__)


class StorageCopy:
    """Copy of what the database knows; one that was interrupted continues where it ended."""

    def __init__(self, settings: Settings, engine: Engine, url: str) -> None:
        self._storage = Storage(settings)
        self._lease_seconds = settings.lease_seconds
        self._engine = engine
        self._remote = RemoteStore(url, self._storage, "the URL")
        self.copied: Counter[str] = Counter()
        self.missing: list[str] = []
        """Files in the database that are missing or different in this storage."""

    def copy_everything(self) -> None:
        """Copy everything, then mark the store as that of this installation.

        Raises:
            SetupError: A worker runs, or the store belongs to another installation.
            StoreUnavailable: The store accepts no more.
        """
        if self._fetch_rows(select(Worker.id).where(Worker.state != "offline", is_fresh(self._lease_seconds))):
            raise SetupError("A worker runs: stop the API and drain all workers (`anneal worker --drain`) first.")
        self._execute(register_installation())
        installation = self._fetch_rows(select(Installation.id))[0].id
        try:
            self._remote.objects.mark_root()
            self._remote.objects.check_owner(installation)
        except WrongStore as error:
            if error.is_marked:
                raise SetupError(f"{self._remote.url} cannot be used: {error}.") from error
        dataset_columns = (Dataset.id, Dataset.extension, Dataset.bytes, Dataset.sha256, Dataset.source)
        for dataset in self._fetch_rows(select(*dataset_columns)):
            self._try_copy("datasets", dataset.id, partial(self._copy_dataset, dataset))
        is_usable = Checkpoint.deleted_at.is_(None) & Checkpoint.bad_reason.is_(None)
        for checkpoint in self._fetch_rows(select(*Checkpoint.__table__.c).where(is_usable)):
            self._try_copy("checkpoints", checkpoint.id, partial(self._copy_checkpoint, checkpoint))
        has_output = (Run.output_attempt == Attempt.attempt).label("has_output")
        hashes = (Attempt.output_sha256, Attempt.records_sha256)
        query = select(Attempt.run_id, Attempt.attempt, has_output, *hashes)
        for attempt in self._fetch_rows(query.join(Run, Run.id == Attempt.run_id)):
            self._try_copy(
                "attempts", f"attempt {attempt.attempt} of {attempt.run_id}", partial(self._copy_attempt, attempt)
            )
        self._remote.objects.claim_for(installation, lambda: True)

    def _try_copy(self, kind: str, name: str, copy: Callable[[], None]) -> None:
        try:
            copy()
            self.copied[kind] += 1
        except (LocalCheckpointMissing, LocalCheckpointCorrupt, OSError, ValueError) as error:
            log.warning("%s is not copied: %s", name, error)
            self.missing.append(name)

    def _copy_dataset(self, row: Any) -> None:
        for file in files_of(row):
            path = self._storage.dataset_file(row.id, file.extension)
            key = self._storage.key_of(path)
            if self._hash_stored(key, file.bytes) != file.sha256:
                self._remote.objects.put(key, _verified_chunks(path, file.sha256))

    def _copy_checkpoint(self, row: Any) -> None:
        folder = self._storage.named_checkpoint(row.run_id, row.attempt, row.name)
        if not self._is_there(folder / file_manifest.MANIFEST, row.manifest_sha256):
            self._remote.send_checkpoint(folder, row.manifest_sha256, lambda: None)
        now = func.clock_timestamp()
        self._execute(
            update(Checkpoint).where(Checkpoint.id == row.id).values(replica_started_at=now, replicated_at=now)
        )

    def _copy_attempt(self, row: Any) -> None:
        attempt = (row.run_id, row.attempt)
        hashes = {}
        output, manifest = self._storage.output_dir(*attempt), self._storage.output_manifest(*attempt)
        if row.has_output and not self._is_there(manifest, row.output_sha256):
            hashes["output_sha256"] = self._remote.send_described(output, manifest, lambda _: True, {}, lambda: None)
        folder, manifest = self._storage.attempt_dir(*attempt), self._storage.records_manifest(*attempt)
        # A host that has only fetched a checkpoint of the attempt has a folder without records.
        has_records = folder.is_dir() and any(is_record(name) for name, _ in entries_below(folder))
        if has_records and not self._is_there(manifest, row.records_sha256):
            hashes["records_sha256"] = self._remote.send_described(folder, manifest, is_record, {}, lambda: None)
        if hashes:
            this = (Attempt.run_id == row.run_id) & (Attempt.attempt == row.attempt)
            self._execute(update(Attempt).where(this).values(**hashes))

    def _is_there(self, manifest: Path, sha256: str | None) -> bool:
        """Return True if the store has this manifest, which is sent last, so that its files are there too."""
        try:
            content = self._remote.objects.read(self._storage.key_of(manifest), file_manifest.MAX_BYTES)
        except ObjectMissing:
            return False
        return hashlib.sha256(content).hexdigest() == sha256

    def _hash_stored(self, key: str, most_bytes: int) -> str | None:
        """Return the SHA-256 of a file of the store; None if there is none."""
        digest = hashlib.sha256()
        try:
            for piece in self._remote.objects.get(key, most_bytes):
                digest.update(piece)
        except ObjectMissing:
            return None
        return digest.hexdigest()

    def _fetch_rows(self, statement: Executable) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.execute(statement).all())

    def _execute(self, statement: Executable) -> None:
        with self._engine.begin() as connection:
            connection.execute(statement)


def _verified_chunks(path: Path, sha256: str) -> Iterator[bytes]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            yield piece
    if digest.hexdigest() != sha256:
        raise ValueError("its file has other contents than were stored")


def main() -> int:
    """Copy to the URL in the argument; 1 if something could not be copied."""
    try:
        settings = resolve_urls(get_settings())
        log_setup.set_up(settings.log_format)
        if settings.storage_url is not None:
            raise SetupError(f"ANNEAL_STORAGE is {settings.storage_url}: run this with the folder that it had before.")
        engine = sync_engine(settings.database_url or "", pool_size=0, name="anneal-copy")
        copy = StorageCopy(settings, engine, sys.argv[1])
        copy.copy_everything()
    except (SetupError, StoreUnavailable) as error:
        print(f"anneal: {error}", file=sys.stderr)  # noqa: T201
        return 1
    counts = ", ".join(f"{copy.copied[kind]:,} {kind}" for kind in ("datasets", "checkpoints", "attempts"))
    print(f"Copied {counts}; {len(copy.missing):,} could not be copied.")  # noqa: T201
    return 1 if copy.missing else 0


if __name__ == "__main__":
    sys.exit(main())
