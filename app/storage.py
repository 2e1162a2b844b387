"""Where files lie. Nothing else knows a path below `ANNEAL_STORAGE`."""

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from app.config import Settings
from app.ids import is_id

_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")


class OutsideStorage(ValueError):
    """A path that leaves the folder it should stay in, or goes through a link."""


class Storage:
    """Folders of data sets and runs below one root, which API and workers share."""

    def __init__(self, settings: Settings) -> None:
        self.root = settings.storage_root

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A fresh folder to build something in; what was not promoted out of it is gone afterwards."""
        folder = self.root / "staging" / uuid4().hex
        folder.mkdir(parents=True, mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def sweep_staging(self, older_than_seconds: float) -> int:
        """Remove staging folders that a killed process left; answers how many."""
        removed = 0
        for folder in self._folders("staging"):
            if _age(folder) > older_than_seconds:
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
        return removed

    def promote(self, source: Path, target: Path) -> None:
        """Move a finished file or folder of `staging()` to its place, so that it survives a power cut."""
        if source.is_file():
            fsync(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        for folder in target.parents:
            fsync(folder)
            if folder == self.root:
                break

    def dataset_file(self, dataset_id: str, extension: str) -> Path:
        """The bytes of a data set."""
        return self._dataset_dir(dataset_id) / f"data.{extension}"

    def remove_dataset(self, dataset_id: str) -> None:
        """Remove the files of a data set; no error where there are none."""
        shutil.rmtree(self._dataset_dir(dataset_id), ignore_errors=True)

    def put_dataset_aside(self, dataset_id: str) -> Path:
        """Move the files of a data set to where they stay for some time, and nobody looks for them; answers where."""
        folder = self._dataset_dir(dataset_id)
        target = self.root / "aside" / f"{folder.name}-{uuid4().hex[:8]}"
        target.parent.mkdir(mode=0o700, exist_ok=True)
        folder.rename(target)
        os.utime(target)
        return target

    def sweep_aside(self, older_than_seconds: float) -> None:
        """Remove what was put aside so long ago."""
        for folder in self._folders("aside"):
            if _age(folder) > older_than_seconds:
                shutil.rmtree(folder, ignore_errors=True)

    def dataset_ids(self, older_than_seconds: float) -> list[str]:
        """Data sets that have files here, last changed at least so long ago."""
        folders = self._folders("datasets")
        return [it.name for it in folders if is_id(it.name, "ds") and _age(it) > older_than_seconds]

    def token_cache(self, user: str | None) -> Path:
        """Tokenised data of all runs that are trained by one unix user (None: the worker's own); may be deleted."""
        return self.root / "cache" / ("tokens" if user is None else f"tokens-{user}")

    def run_dir(self, run_id: str) -> Path:
        """Everything of a run."""
        return self.root / "runs" / _checked(run_id, "run")

    def remove_run(self, run_id: str) -> None:
        """Remove everything of a run, where there is anything; raises OSError when something stays."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.run_dir(run_id))

    def journal(self, run_id: str) -> Path:
        """The trainers' own account of a run, one for all its attempts."""
        return self.run_dir(run_id) / "journal.jsonl"

    def attempt_dir(self, run_id: str, attempt: int) -> Path:
        """What one attempt writes, and no other."""
        return self.run_dir(run_id) / f"a{attempt}"

    def shown(self, run_id: str, attempt: int, name: str) -> str:
        """The path of something in `attempt_dir`, for lists: to make a `Path` of each takes longer than the query."""
        return f"{self.root}/runs/{run_id}/a{attempt}/{name}"

    def checkpoint_dir(self, run_id: str, attempt: int, step: int) -> Path:
        """A checkpoint; it exists only when it is whole."""
        return self.attempt_dir(run_id, attempt) / checkpoint_name(step)

    def named_checkpoint(self, run_id: str, attempt: int, name: str) -> Path:
        """The folder of a checkpoint by the name that its row has."""
        if _CHECKPOINT.fullmatch(name) is None:
            raise OutsideStorage(f"not the name of a checkpoint: {name!r}")
        return self.attempt_dir(run_id, attempt) / name

    def remove_checkpoint(self, run_id: str, attempt: int, name: str) -> None:
        """Remove the folder of a checkpoint, where there is one; raises OSError when something stays."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.named_checkpoint(run_id, attempt, name))

    def key_of(self, path: Path) -> str:
        """What something below the root is called in a second storage: the same path, below the root of that one."""
        return path.relative_to(self.root).as_posix()

    def output_dir(self, run_id: str, attempt: int) -> Path:
        """The fine-tuned model and what belongs to it."""
        return self.attempt_dir(run_id, attempt) / "output"

    @staticmethod
    def open_below(root: Path, relative: str) -> int:
        """A descriptor of the plain file at `relative` below `root`, for reading.

        Each folder is opened from the one before, so that nobody who may write there can put a link into the way in
        between; `root` itself must be no link either. Raises `OutsideStorage` as `resolve_below` does, and for what is
        no plain file; OSError for what is not there.
        """
        _refuse_outside(relative)
        *folders, name = relative.split("/")
        way = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(root, way | os.O_DIRECTORY)
        try:
            for part in folders:
                below = os.open(part, way | os.O_DIRECTORY, dir_fd=folder)
                os.close(folder)
                folder = below
            file = os.open(name, way | os.O_NONBLOCK, dir_fd=folder)  # a pipe would be waited for
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OutsideStorage(f"no plain file: {relative!r}")
        return file

    @staticmethod
    def resolve_below(root: Path, relative: str) -> Path:
        """The path of `relative` below `root`.

        Raises `OutsideStorage` for `..`, absolute paths, NUL, backslashes and for anything that is, or lies
        behind, a symbolic link. The file itself need not exist.
        """
        _refuse_outside(relative)
        path = root
        for part in relative.split("/"):
            path = path / part
            if path.is_symlink():
                raise OutsideStorage(f"a symbolic link: {relative!r}")
        return path

    def _dataset_dir(self, dataset_id: str) -> Path:
        return self.root / "datasets" / _checked(dataset_id, "ds")

    def _folders(self, name: str) -> list[Path]:
        parent = self.root / name
        return [it for it in parent.iterdir() if it.is_dir()] if parent.is_dir() else []


def checkpoint_name(step: int) -> str:
    """What the folder of a checkpoint is called."""
    return f"checkpoint-{step}"


def fsync(path: Path) -> None:
    """Bring a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_outside(relative: str) -> None:
    if "\0" in relative or "\\" in relative or any(part in ("", ".", "..") for part in relative.split("/")):
        raise OutsideStorage(f"not a path below the folder: {relative!r}")


def _checked(id: str, prefix: str) -> str:
    if not is_id(id, prefix):
        raise OutsideStorage(f"not an id of the form {prefix}_…: {id!r}")
    return id


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
