"""Layout of `ANNEAL_STORAGE`; the only module that builds paths below it."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from app.config import Settings
from app.infra.ids import is_id
from app.infra.untrusted_folder import OutsideStorage

_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")


class Storage:
    """Folders of datasets and runs below one root that the API and workers share."""

    def __init__(self, settings: Settings) -> None:
        self.root = settings.storage_root

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Provide a new temporary folder; what is not promoted out of it is deleted at the end."""
        folder = self.root / "staging" / uuid4().hex
        folder.mkdir(parents=True, mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def sweep_staging(self, older_than_seconds: float) -> int:
        """Remove staging folders left by killed processes; return their number."""
        removed = 0
        for folder in self._folders("staging"):
            if _age(folder) > older_than_seconds:
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
        return removed

    def promote(self, source: Path, target: Path) -> None:
        """Move a finished file or folder of `staging()` to its target durably (with fsync)."""
        if source.is_file():
            fsync(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        for folder in target.parents:
            fsync(folder)
            if folder == self.root:
                break

    def dataset_file(self, dataset_id: str, extension: str) -> Path:
        """Return the path of a dataset's file."""
        return self._dataset_dir(dataset_id) / f"data.{extension}"

    def remove_dataset(self, dataset_id: str) -> None:
        """Remove the files of a dataset; no error if there are none."""
        shutil.rmtree(self._dataset_dir(dataset_id), ignore_errors=True)

    def put_dataset_aside(self, dataset_id: str) -> Path:
        """Move the files of a dataset to the `aside` folder, where they are kept for some time; return the new path."""
        folder = self._dataset_dir(dataset_id)
        target = self.root / "aside" / f"{folder.name}-{uuid4().hex[:8]}"
        target.parent.mkdir(mode=0o700, exist_ok=True)
        folder.rename(target)
        os.utime(target)
        return target

    def sweep_aside(self, older_than_seconds: float) -> None:
        """Remove folders that were put aside longer ago than this."""
        for folder in self._folders("aside"):
            if _age(folder) > older_than_seconds:
                shutil.rmtree(folder, ignore_errors=True)

    def dataset_ids(self, older_than_seconds: float) -> list[str]:
        """Return the ids of datasets whose files were last changed longer ago than this."""
        folders = self._folders("datasets")
        return [it.name for it in folders if is_id(it.name, "ds") and _age(it) > older_than_seconds]

    def token_cache(self, user: str | None) -> Path:
        """Return the folder of tokenized data of one Unix user's runs (None: the worker's user); may be deleted."""
        return self.root / "cache" / ("tokens" if user is None else f"tokens-{user}")

    @property
    def runs(self) -> Path:
        """Folder of the folders of all runs."""
        return self.root / "runs"

    def run_dir(self, run_id: str) -> Path:
        """Return the folder of a run."""
        return self.runs / _checked(run_id, "run")

    def remove_run(self, run_id: str) -> None:
        """Remove the folder of a run if it exists; raises `OSError` if something cannot be removed."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.run_dir(run_id))

    def journal(self, run_id: str) -> Path:
        """Return the path of the journal that the trainers of all attempts of a run write."""
        return self.run_dir(run_id) / "journal.jsonl"

    def attempt_dir(self, run_id: str, attempt: int) -> Path:
        """Return the folder that only one attempt writes."""
        return self.run_dir(run_id) / f"a{attempt}"

    def shown(self, run_id: str, attempt: int, name: str) -> str:
        """Return a path in `attempt_dir` as text, for lists: creating a `Path` for each takes longer than the query."""
        return f"{self.root}/runs/{run_id}/a{attempt}/{name}"

    def checkpoint_dir(self, run_id: str, attempt: int, step: int) -> Path:
        """Return the folder of a checkpoint; it exists only once it is complete."""
        return self.attempt_dir(run_id, attempt) / checkpoint_name(step)

    def named_checkpoint(self, run_id: str, attempt: int, name: str) -> Path:
        """Return the folder of a checkpoint by the name in its row."""
        if _CHECKPOINT.fullmatch(name) is None:
            raise OutsideStorage(f"not the name of a checkpoint: {name!r}")
        return self.attempt_dir(run_id, attempt) / name

    def remove_checkpoint(self, run_id: str, attempt: int, name: str) -> None:
        """Remove the folder of a checkpoint if it exists; raises `OSError` if something cannot be removed."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.named_checkpoint(run_id, attempt, name))

    def fetch_dir(self, checkpoint: Path, own_name: str) -> Path:
        """Return the folder in which a worker stages a checkpoint that it fetches.

        It is outside the attempt's folder, which belongs to the user that trains.
        """
        attempt = checkpoint.parent
        return attempt.with_name(f".fetch-{attempt.name}-{checkpoint.name}.{own_name}")

    def key_of(self, path: Path) -> str:
        """Return the key of a path in the replica storage: the path relative to the root."""
        return path.relative_to(self.root).as_posix()

    def output_dir(self, run_id: str, attempt: int) -> Path:
        """Return the folder of the fine-tuned model and its other files."""
        return self.attempt_dir(run_id, attempt) / "output"

    def _dataset_dir(self, dataset_id: str) -> Path:
        return self.root / "datasets" / _checked(dataset_id, "ds")

    def _folders(self, name: str) -> list[Path]:
        parent = self.root / name
        return [it for it in parent.iterdir() if it.is_dir()] if parent.is_dir() else []


def checkpoint_name(step: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"checkpoint-{step}"


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked(id: str, prefix: str) -> str:
    if not is_id(id, prefix):
        raise OutsideStorage(f"not an id of the form {prefix}_…: {id!r}")
    return id


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
