"""`anneal export`: writes runs with all that belongs to them, datasets and keys to one file, while the service runs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, or_, select

from anneal.contracts.run_status import TERMINAL
from app.backup.archive import ArchiveWriter
from app.backup.contents import Contents, find_problems, open_snapshot
from app.backup.copying import SourceFile, UnreadableFile, open_source, pieces_of, stored_files
from app.backup.home_database import open_database
from app.backup.layout import FileEntry, Problem, file_problem
from app.backup.progress import Progress
from app.backup.tables import DATASETS, EXPERIMENTS, KEYS, TABLES
from app.config import Settings
from app.infra.clock import utc_now
from app.infra.errors import SetupError
from app.infra.files.untrusted_folder import OutsideStorage, read_below
from app.infra.storage import Storage
from app.tables.administration.api_keys import ApiKey
from app.tables.base import equals_any
from app.tables.datasets import Dataset
from app.tables.experiments import Experiment
from app.tables.runs import Run, RunEvalDataset, RunRewardModel

_MOST_NAMED = 5


@dataclass(frozen=True)
class Selection:
    """Ids of what is exported."""

    runs: set[str]
    datasets: set[str]
    experiments: set[str]
    keys: set[str]
    live: list[str]
    """Runs that are left out, since they have not ended or need one that has not."""


@dataclass(frozen=True)
class CreatedArchive:
    """Result of an export."""

    path: Path
    selection: Selection
    files: int
    file_bytes: int
    problems: list[Problem]
    """Rows whose files are missing or corrupt in the service."""


class ExportJob:
    """Exports the named runs and those of the named experiments, or everything if none is named."""

    def __init__(
        self,
        settings: Settings,
        path: Path,
        progress: Progress,
        *,
        runs: Sequence[str] = (),
        experiments: Sequence[str] = (),
        with_keys: bool = False,
    ) -> None:
        self._settings = settings
        self._path = path.expanduser().absolute()
        self._progress = progress
        self._runs, self._experiments, self._with_keys = runs, experiments, with_keys
        self._storage = Storage(settings)

    def run(self) -> CreatedArchive:
        """Write the archive.

        Raises:
            SetupError: Something prevents it; nothing is written.
        """
        if self._settings.storage_url is not None:
            raise SetupError(
                f"The files are in the object store {self._settings.storage_url}, which an export does not read: use "
                "`anneal backup`, or set ANNEAL_STORAGE to a folder with a copy of it."
            )
        writer = ArchiveWriter(self._path)
        with (
            writer.open_file(),
            open_database(self._settings, self._progress.say) as url,
            open_snapshot(url) as connection,
        ):
            selection = self._select_contents(connection)
            contents = Contents.from_database(connection, selection.runs, selection.datasets)
            owners = {KEYS: selection.keys, EXPERIMENTS: selection.experiments, DATASETS: selection.datasets}
            with self._progress.step("Reading the database", None):
                for table in TABLES:
                    writer.add_rows(
                        table.name, table.columns, table.read_rows(connection, owners.get(table, selection.runs))
                    )
            problems = self._add_files(writer, contents)
            writer.finish_archive(utc_now(), version("anneal"), contents.revision)
        size = sum(entry.bytes for entry in writer.entries)
        return CreatedArchive(self._path, selection, len(writer.entries), size, problems)

    def _select_contents(self, connection: Connection) -> Selection:
        keys = set(connection.scalars(select(ApiKey.id))) if self._with_keys else set()
        is_everything = not self._runs and not self._experiments
        condition = or_(
            Run.id.in_([_id_of(connection, Run, "run", name) for name in self._runs]),
            Run.experiment_id.in_([_id_of(connection, Experiment, "experiment", name) for name in self._experiments]),
        )
        query = select(Run.id) if is_everything else select(Run.id).where(condition)
        runs, live = _with_dependencies(connection, set(connection.scalars(query)))
        if is_everything:
            datasets = set(connection.scalars(select(Dataset.id)))
            return Selection(runs, datasets, set(connection.scalars(select(Experiment.id))), keys, live)
        if not runs and not live:
            raise SetupError("The experiments that were chosen have no runs; `anneal experiments list` lists others.")
        if not runs:
            raise SetupError("None of these runs has ended: wait for their end, or stop them.")
        chosen = equals_any(Run.id, runs)
        datasets = set(connection.scalars(select(Run.dataset_id).where(chosen, Run.dataset_id.is_not(None))))
        datasets |= set(connection.scalars(select(Run.eval_dataset_id).where(chosen, Run.eval_dataset_id.is_not(None))))
        extra = select(RunEvalDataset.dataset_id).where(equals_any(RunEvalDataset.run_id, runs))
        datasets |= set(connection.scalars(extra))
        return Selection(runs, datasets, set(connection.scalars(select(Run.experiment_id).where(chosen))), keys, live)

    def _add_files(self, writer: ArchiveWriter, contents: Contents) -> list[Problem]:
        root = self._storage.root
        unreadable: dict[str, str] = {}
        sources = list(stored_files(root, contents, unreadable))
        done = 0
        with self._progress.step("Copying files", sum(source.bytes for source in sources)) as report:
            for source in sources:
                try:
                    _add_file(writer, root, source)
                except UnreadableFile as error:
                    unreadable[source.path] = str(error)
                except (FileNotFoundError, NotADirectoryError, OutsideStorage):
                    continue  # removed meanwhile, unless the database says otherwise
                done += source.bytes
                report(done)
        files = {entry.path: entry for entry in writer.entries}
        problems = list(find_problems(contents, files, self._storage, lambda path: _read_file(root, files[path])))
        return problems + [file_problem(path, reason) for path, reason in unreadable.items()]


def _add_file(writer: ArchiveWriter, root: Path, source: SourceFile) -> None:
    with os.fdopen(open_source(root, source.path), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        entry = FileEntry(source.path, status.st_size, "", status.st_mtime_ns, status.st_mode & 0o777)
        writer.add_file(entry, pieces_of(file))


def _read_file(root: Path, entry: FileEntry) -> bytes:
    kind, name, below = entry.path.split("/", 2)
    return read_below(root / kind / name, below, entry.bytes)


def _with_dependencies(connection: Connection, selected: set[str]) -> tuple[set[str], list[str]]:
    """Return the runs that have ended with all that they need, and those left out for one that has not."""
    needs: dict[str, set[str]] = {}
    ended: dict[str, bool] = {}
    pending = selected
    while pending:
        rows = select(Run.id, Run.status, Run.parent_run_id, Run.base_run_id).where(equals_any(Run.id, pending))
        for id, status, *needed in connection.execute(rows):
            needs[id] = {other for other in needed if other is not None}
            ended[id] = status in TERMINAL
        rewards = select(RunRewardModel.run_id, RunRewardModel.reward_run_id)
        for id, other in connection.execute(rewards.where(equals_any(RunRewardModel.run_id, pending))):
            needs[id].add(other)
        pending = {other for id in pending for other in needs[id]} - needs.keys()
    left_out = {id for id, has_ended in ended.items() if not has_ended}
    while more := {id for id, needed in needs.items() if needed & left_out} - left_out:
        left_out |= more
    return needs.keys() - left_out, sorted(left_out)


def _id_of(connection: Connection, model: Any, noun: str, text: str) -> str:
    ids = list(connection.scalars(select(model.id).where(or_(model.id == text, model.name == text)).order_by(model.id)))
    if len(ids) == 1:
        return str(ids[0])
    if not ids:
        raise SetupError(f"There is no {noun} {text!r}: use an id or a whole name; `anneal {noun}s list` lists them.")
    raise SetupError(f"{text!r} is the name of {len(ids)} {noun}s: use an id, such as {', '.join(ids[:_MOST_NAMED])}.")
