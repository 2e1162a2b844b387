"""Layout of `ANNEAL_STORAGE`; the only module that builds paths below it.

If it is the URL of an object store, the layout there is the same, and the folder on this machine has a working copy of
some of it: what a worker fetches and writes, and what the API stages.
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar
from uuid import uuid4

from app.config import Settings
from app.infra.async_tasks import skipping_errors
from app.infra.files.object_store import (
    PIECE_BYTES,
    SMALL_PART_BYTES,
    ObjectMissing,
    ObjectStore,
    StoredFile,
    StoreUnavailable,
)
from app.infra.files.store_calls import StoreCalls
from app.infra.files.tree import remove_tree
from app.infra.files.untrusted_folder import OutsideStorage
from app.infra.files.verified_reads import DigestFolder, VerifiedReads
from app.infra.ids import is_id

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_CALLS, _CALL_SECONDS, _CALL_WAIT_SECONDS = 12, 15.0, 1.0
_TRANSFERS, _TRANSFER_WAIT_SECONDS = 8, 60.0
_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")


class Storage:
    """Folders of datasets and runs below one root.

    With `objects`, as the API and commands have it, datasets and runs are stored there, and what is removed is removed
    there too. Without, which is how a worker sees even the working copy of an object store, all is in the folder.
    """

    def __init__(self, settings: Settings, objects: ObjectStore | None = None) -> None:
        self.root = settings.storage_root
        self.objects = objects
        self.calls = StoreCalls(_CALLS, _CALL_WAIT_SECONDS, _CALL_SECONDS)
        self.verified_reads = VerifiedReads(_CALL_SECONDS, DigestFolder(settings.home / "digests"))
        self._transfers = StoreCalls(_TRANSFERS, _TRANSFER_WAIT_SECONDS, None)

    @classmethod
    def shared(cls, settings: Settings) -> "Storage":
        """Return the storage as the API and commands use it.

        Raises:
            SetupError: No installed library supports the URL.
        """
        url = settings.storage_url
        return cls(settings, None if url is None else ObjectStore(url, "ANNEAL_STORAGE"))

    @property
    def name(self) -> str:
        """Folder or URL, for messages."""
        return str(self.root) if self.objects is None else self.objects.url

    async def in_thread(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run work that may read something of the storage, like `asyncio.to_thread`.

        Raises:
            StoreUnavailable: The object store does not answer within seconds, or too many other calls wait for it.
        """
        if self.objects is None:
            return await asyncio.to_thread(work, *arguments, **named)
        return await self.calls.run(work, *arguments, **named)

    async def in_transfer(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run work that may take as long as a whole dataset or run, like `in_thread` without its time limit."""
        if self.objects is None:
            return await asyncio.to_thread(work, *arguments, **named)
        return await self._transfers.run(work, *arguments, **named)

    @contextmanager
    def staging_folder(self) -> Iterator[Path]:
        """Provide a new temporary folder; what is not promoted out of it is deleted at the end."""
        folder = self.root / "staging" / uuid4().hex
        folder.mkdir(parents=True, mode=0o700)
        try:
            yield folder
        finally:
            remove_tree(folder, ignore_errors=True)

    def sweep_staging(self, older_than_seconds: float) -> int:
        """Remove staging folders left by killed processes; return their number."""
        removed = 0
        for folder in self._list_folders("staging"):
            with skipping_errors(log, "cannot remove the unfinished upload %s", folder):
                if _age_seconds(folder) > older_than_seconds:
                    remove_tree(folder)
                    removed += 1
        return removed

    def promote_staged(self, source: Path, target: Path) -> None:
        """Move a finished file or folder of `staging_folder()` to its target durably (with fsync)."""
        if source.is_file():
            fsync_path(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        for folder in target.parents:
            fsync_path(folder)
            if folder == self.root:
                break

    def dataset_file(self, dataset_id: str, extension: str) -> Path:
        """Return the path of a dataset's file."""
        return self._dataset_dir(dataset_id) / f"data.{extension}"

    def store_dataset(self, source: Path, dataset_id: str, extension: str) -> None:
        """Move a finished file of `staging_folder()` to the place of a dataset, durably and completely or not at all.

        Raises:
            StoreUnavailable: The object store accepts no more.
        """
        target = self.dataset_file(dataset_id, extension)
        if self.objects is None:
            self.promote_staged(source, target)
            return
        with source.open("rb") as file:
            pieces = iter(lambda: file.read(PIECE_BYTES), b"")
            self.objects.put(self.key_of(target), pieces, part_bytes=SMALL_PART_BYTES)
        source.unlink()

    def open_dataset(self, dataset_id: str, extension: str) -> BinaryIO | StoredFile:
        """Open the file of a dataset.

        Raises:
            FileNotFoundError: It is missing.
            StoreUnavailable: The object store does not answer.
        """
        path = self.dataset_file(dataset_id, extension)
        if self.objects is None:
            return path.open("rb")
        try:
            return self.objects.open(self.key_of(path))
        except ObjectMissing as error:
            raise FileNotFoundError(path.name) from error

    def remove_dataset(self, dataset_id: str) -> None:
        """Remove the files of a dataset; no error if there are none, or if they cannot be removed now."""
        folder = self._dataset_dir(dataset_id)
        if self.objects is not None:
            with suppress(StoreUnavailable):  # the sweep finds it
                self.objects.remove(self.key_of(folder))
        remove_tree(folder, ignore_errors=True)

    def put_dataset_aside(self, dataset_id: str) -> str:
        """Move the files of a dataset to the `aside` folder, where they are kept for some time; return the new path."""
        folder = self._dataset_dir(dataset_id)
        target = self.root / "aside" / f"{folder.name}-{uuid4().hex[:8]}"
        if self.objects is not None:
            self.objects.move(self.key_of(folder), self.key_of(target))
            return f"{self.objects.url}/{self.key_of(target)}"
        target.parent.mkdir(mode=0o700, exist_ok=True)
        folder.rename(target)
        os.utime(target)
        return str(target)

    def sweep_aside(self, older_than_seconds: float) -> None:
        """Remove folders that were put aside longer ago than this."""
        if self.objects is not None:
            for name in self._old_objects(self.objects, "aside", older_than_seconds):
                with skipping_errors(log, "cannot remove the dataset %s that was put aside", name):
                    self.objects.remove(f"aside/{name}")
            return
        for folder in self._list_folders("aside"):
            with skipping_errors(log, "cannot remove the dataset %s that was put aside", folder):
                if _age_seconds(folder) > older_than_seconds:
                    remove_tree(folder)

    def dataset_ids(self, older_than_seconds: float) -> list[str]:
        """Return the ids of datasets whose files were last changed longer ago than this."""
        if self.objects is not None:
            return [it for it in self._old_objects(self.objects, "datasets", older_than_seconds) if is_id(it, "ds")]
        folders = self._list_folders("datasets")
        return [it.name for it in folders if is_id(it.name, "ds") and _age_seconds(it) > older_than_seconds]

    def token_cache(self, user: str | None) -> Path:
        """Return the folder of tokenized data of one Unix user's runs (None: the worker's user); may be deleted."""
        return self.root / "cache" / ("tokens" if user is None else f"tokens-{user}")

    @property
    def runs(self) -> Path:
        """Folder of the folders of all runs."""
        return self.root / "runs"

    def run_dir(self, run_id: str) -> Path:
        """Return the folder of a run."""
        return self.runs / _check_id(run_id, "run")

    def remove_run(self, run_id: str) -> None:
        """Remove the folder of a run if it exists.

        Raises:
            OSError, StoreUnavailable: Something cannot be removed now.
        """
        self._remove_folder(self.run_dir(run_id))

    def journal_path(self, run_id: str) -> Path:
        """Return the path of the journal that the trainers of all attempts of a run write, if they are to."""
        return self.run_dir(run_id) / "journal.jsonl"

    def attempt_dir(self, run_id: str, attempt: int) -> Path:
        """Return the folder that only one attempt writes."""
        return self.run_dir(run_id) / f"a{attempt}"

    def shown_path(self, run_id: str, attempt: int, name: str) -> str:
        """Return a path in `attempt_dir` as text, for lists: creating a `Path` for each takes longer than the query."""
        return f"{self.name}/runs/{run_id}/a{attempt}/{name}"

    def checkpoint_dir(self, run_id: str, attempt: int, step: int) -> Path:
        """Return the folder of a checkpoint; it exists only once it is complete."""
        return self.attempt_dir(run_id, attempt) / checkpoint_name(step)

    def named_checkpoint(self, run_id: str, attempt: int, name: str) -> Path:
        """Return the folder of a checkpoint by the name in its row."""
        if _CHECKPOINT.fullmatch(name) is None:
            raise OutsideStorage(f"not the name of a checkpoint: {name!r}")
        return self.attempt_dir(run_id, attempt) / name

    def remove_checkpoint(self, run_id: str, attempt: int, name: str) -> None:
        """Remove the folder of a checkpoint if it exists; raises as `remove_run` does."""
        self._remove_folder(self.named_checkpoint(run_id, attempt, name))

    def fetch_dir(self, checkpoint: Path, own_name: str) -> Path:
        """Return the folder in which a worker stages a checkpoint that it fetches.

        It is outside the attempt's folder, which belongs to the user that trains.
        """
        attempt = checkpoint.parent
        return attempt.with_name(f".fetch-{attempt.name}-{checkpoint.name}.{own_name}")

    def key_of(self, path: Path) -> str:
        """Return the key of a path in the object store: the path relative to the root."""
        return path.relative_to(self.root).as_posix()

    def output_dir(self, run_id: str, attempt: int) -> Path:
        """Return the folder of the fine-tuned model and its other files."""
        return self.attempt_dir(run_id, attempt) / "output"

    def output_manifest(self, run_id: str, attempt: int) -> Path:
        """Return the place of the manifest of an output in an object store."""
        return self.attempt_dir(run_id, attempt) / "output.manifest.json"

    def records_manifest(self, run_id: str, attempt: int) -> Path:
        """Return the place of the manifest of an attempt's records in an object store."""
        return self.attempt_dir(run_id, attempt) / "records.manifest.json"

    def _dataset_dir(self, dataset_id: str) -> Path:
        return self.root / "datasets" / _check_id(dataset_id, "ds")

    def _remove_folder(self, folder: Path) -> None:
        if self.objects is not None:
            self.objects.remove(self.key_of(folder))
        with suppress(FileNotFoundError):
            remove_tree(folder)

    def _old_objects(self, objects: ObjectStore, name: str, older_than_seconds: float) -> list[str]:
        """Return the folders below a key of which every file was last changed longer ago than this."""
        newest: dict[str, float] = {}
        for file in objects.list(name):
            folder = file.key.split("/")[1]
            newest[folder] = max(newest.get(folder, 0.0), file.modified)
        now = time.time()
        return [folder for folder, modified in newest.items() if now - modified > older_than_seconds]

    def _list_folders(self, name: str) -> list[Path]:
        parent = self.root / name
        return [it for it in parent.iterdir() if it.is_dir()] if parent.is_dir() else []


def checkpoint_name(step: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"checkpoint-{step}"


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_id(id: str, prefix: str) -> str:
    if not is_id(id, prefix):
        raise OutsideStorage(f"not an id of the form {prefix}_…: {id!r}")
    return id


def _age_seconds(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
