"""Files of the storage that one snapshot of the database lists, and the comparison of the files with it."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, select, text

from app.backup.layout import FileEntry, Problem
from app.infra.db import sync_engine
from app.infra.errors import SetupError
from app.infra.files import file_manifest
from app.infra.storage import Storage
from app.tables.base import equals_any
from app.tables.checkpoints import Checkpoint
from app.tables.datasets import Dataset, files_of
from app.tables.migrate import current_revision, schema_error
from app.tables.runs import Run


@dataclass(frozen=True)
class StoredDataset:
    """File of a dataset as the database describes it."""

    id: str
    extension: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredCheckpoint:
    """Checkpoint that is not deleted and not marked as bad."""

    id: str
    run_id: str
    attempt: int
    name: str
    manifest_sha256: str


@dataclass(frozen=True)
class Contents:
    """Files of the storage that one snapshot of the database lists."""

    revision: str
    datasets: list[StoredDataset]
    """Files of datasets; those of one dataset follow each other."""
    checkpoints: list[StoredCheckpoint]
    attempts: dict[str, int]
    """Newest attempt of each run, 0 before its first."""
    outputs: list[tuple[str, int]]
    """Runs that have an output, with its attempt."""

    @classmethod
    def from_database(
        cls, connection: Connection, run_ids: Collection[str] | None = None, dataset_ids: Collection[str] | None = None
    ) -> "Contents":
        """Read everything, or these runs and datasets.

        Raises:
            SetupError: The database has no tables of Anneal, or those of an earlier version.
        """
        revision = current_revision(connection)
        if not revision:
            raise SetupError("The database has no tables of Anneal, so there is nothing to back up.")
        if (error := schema_error(revision)) is not None:
            raise SetupError(error)
        stored = Checkpoint.deleted_at.is_(None) & Checkpoint.bad_reason.is_(None)
        checkpoint_columns = (
            Checkpoint.id, Checkpoint.run_id, Checkpoint.attempt, Checkpoint.name, Checkpoint.manifest_sha256,
        )  # fmt: skip
        dataset_query = select(Dataset.id, Dataset.extension, Dataset.bytes, Dataset.sha256, Dataset.source)
        checkpoint_query = select(*checkpoint_columns).where(stored)
        run_query = select(Run.id, Run.attempt, Run.output_attempt)
        if run_ids is not None:
            checkpoint_query = checkpoint_query.where(equals_any(Checkpoint.run_id, run_ids))
            run_query = run_query.where(equals_any(Run.id, run_ids))
        if dataset_ids is not None:
            dataset_query = dataset_query.where(equals_any(Dataset.id, dataset_ids))
        datasets = connection.execute(dataset_query)
        checkpoints = connection.execute(checkpoint_query)
        runs = connection.execute(run_query).all()
        return cls(
            revision,
            [StoredDataset(row.id, *file) for row in datasets for file in files_of(row)],
            [StoredCheckpoint(*row) for row in checkpoints],
            {row.id: row.attempt for row in runs},
            [(row.id, row.output_attempt) for row in runs if row.output_attempt is not None],
        )


@contextmanager
def open_snapshot(url: str) -> Iterator[Connection]:
    """Open a read-only transaction that sees one state of the database until it ends, however long that takes."""
    engine = sync_engine(url, pool_size=0, name="anneal-backup", statement_seconds=0)
    try:
        with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
            connection.execute(text("SET idle_in_transaction_session_timeout = 0"))
            yield connection
    finally:
        engine.dispose()


def find_problems(
    contents: Contents, files: Mapping[str, FileEntry], storage: Storage, read: Callable[[str], bytes]
) -> Iterator[Problem]:
    """Compare what the database knows with the files.

    Args:
        contents: files that the database lists.
        files: The files by path below the storage.
        storage: Layout of the storage.
        read: Returns the content of one of the files.
    """
    for dataset in contents.datasets:
        file = files.get(storage.key_of(storage.dataset_file(dataset.id, dataset.extension)))
        if file is None:
            yield Problem(kind="dataset", id=dataset.id, problem="its file is missing")
        elif (file.bytes, file.sha256) != (dataset.bytes, dataset.sha256):
            yield Problem(kind="dataset", id=dataset.id, problem="its file has other contents than were stored")
    for checkpoint in contents.checkpoints:
        folder = storage.key_of(storage.named_checkpoint(checkpoint.run_id, checkpoint.attempt, checkpoint.name))
        if (problem := _problem_of_checkpoint(checkpoint, folder, files, read)) is not None:
            yield Problem(kind="checkpoint", id=checkpoint.id, problem=f"{problem} ({folder})")
    folders = {"/".join(path.split("/")[:4]) for path in files if path.startswith("runs/")}
    for run_id, attempt in contents.outputs:
        if storage.key_of(storage.output_dir(run_id, attempt)) not in folders:
            yield Problem(kind="output", id=run_id, problem="the files of its output are missing")


def _problem_of_checkpoint(
    checkpoint: StoredCheckpoint, folder: str, files: Mapping[str, FileEntry], read: Callable[[str], bytes]
) -> str | None:
    manifest = files.get(f"{folder}/{file_manifest.MANIFEST}")
    if manifest is None:
        return "its files are missing"
    if manifest.sha256 != checkpoint.manifest_sha256 or manifest.bytes > file_manifest.MAX_BYTES:
        return "it has another manifest than was stored"
    content = read(manifest.path)
    if hashlib.sha256(content).hexdigest() != checkpoint.manifest_sha256:
        return "its manifest has other contents than were stored"
    try:
        listed = file_manifest.parse_manifest(content)
    except ValueError as error:
        return f"its manifest cannot be used: {error}"
    for name, (size, sha256) in listed.items():
        file = files.get(f"{folder}/{name}")
        if file is None:
            return f"{name} is missing"
        if (file.bytes, file.sha256) != (size, sha256):
            return f"{name} has other contents than were written"
    return None


def is_listed(connection: Connection, problem: Problem) -> bool:
    """Return True if the database still lists what has this problem; otherwise it was deleted meanwhile."""
    if problem.kind == "dataset":
        query = select(Dataset.id).where(Dataset.id == problem.id)
    elif problem.kind == "checkpoint":
        is_stored = Checkpoint.deleted_at.is_(None) & Checkpoint.bad_reason.is_(None)
        query = select(Checkpoint.id).where(Checkpoint.id == problem.id, is_stored)
    else:
        query = select(Run.id).where(Run.id == problem.id)
    return connection.execute(query).first() is not None
