"""Access to the output files of a run."""

import os
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.errors import ApiError, not_found, printable
from app.contracts.run_status import TERMINAL
from app.contracts.run_task import RunTask
from app.contracts.schemas.artifacts import Artifact, Artifacts
from app.infra.storage import Storage
from app.infra.terminal_text import plain_line
from app.infra.untrusted_folder import OutsideStorage, entries_below, open_below
from app.tables.runs import Run

RECORDS = frozenset({"metrics.jsonl", "distributions.jsonl", "memory_profile.jsonl", "memory_snapshot.pickle"})
"""Files in an attempt's folder that record its training."""
_TENSORBOARD = "tensorboard/"
MAX_FILES = 2000
"""Files and folders that are listed or archived; an archive that is sent takes a kilobyte of memory for each."""


async def output_folder(session: AsyncSession, storage: Storage, run_id: str) -> Path:
    """Return the output folder of a run; raise 404 with the reason if there is none."""
    query = select(Run.status, Run.task, Run.output_attempt).where(Run.id == run_id)
    run = (await session.execute(query)).one_or_none()
    if run is None:
        raise not_found("run", run_id)
    if run.task == RunTask.evaluate:
        message = f"Run {run_id} is an evaluation, which has no output; its metrics are in `evaluation` of the run."
        raise ApiError(404, "no_artifacts", message)
    if run.output_attempt is None:
        way = "resume the run to finish it" if run.task == RunTask.train else "export the checkpoint again"
        reason = (
            f"it ended as {run.status} without output; {way}"
            if run.status in TERMINAL
            else f"it is {run.status}; follow /v1/runs/{run_id}/events until it ends"
        )
        raise ApiError(404, "no_artifacts", f"Run {run_id} has no output yet: {reason}.")
    return storage.output_dir(run_id, run.output_attempt)


async def attempt_folder(session: AsyncSession, storage: Storage, run_id: str, attempt: int) -> Path:
    """Return the folder of an attempt of a run; raise 404 if there was no such attempt."""
    last = (await session.execute(select(Run.attempt).where(Run.id == run_id))).scalar_one_or_none()
    if last is None:
        raise not_found("run", run_id)
    if not 1 <= attempt <= last:
        raise ApiError(
            404, "attempt_not_found", f"Run {run_id} has no attempt {attempt}; it has had {last} so far, from 1 on."
        )
    return storage.attempt_dir(run_id, attempt)


def is_record(path: str) -> bool:
    """Return True for a file in which an attempt records its training, such as `metrics.jsonl`."""
    return path in RECORDS or path.startswith(_TENSORBOARD)


def listed_records(folder: Path) -> Artifacts:
    """Return the records in an attempt's folder, sorted by path; links are neither followed nor listed."""
    return listed(folder, is_record)


def open_record(folder: Path, path: str) -> int:
    """Open a record of an attempt and return its descriptor; raise 404 for any other file."""
    if not is_record(path):
        raise _no_such_artifact(path)
    return open_file(folder, path)


def listed(folder: Path, is_wanted: Callable[[str], bool] = lambda _: True) -> Artifacts:
    """Return the files below `folder` whose paths are wanted, sorted by path; links are neither followed nor listed."""
    found, left_out = files(folder, is_wanted)
    return Artifacts(data=[Artifact(path=path, bytes=status.st_size) for path, status in found], left_out=left_out)


def open_file(folder: Path, path: str) -> int:
    """Open the file at `path` below `folder` and return its descriptor; raise 404 unless it is a regular file inside.

    The training process owns this folder, so its content is untrusted and can change at any time.
    """
    if not _is_plain(path):
        raise _no_such_artifact(path)
    try:
        return open_below(folder, path)
    except (OutsideStorage, OSError):
        # The response must not reveal whether a path outside the folder exists.
        raise _no_such_artifact(path) from None


def _no_such_artifact(path: str) -> ApiError:
    return ApiError(
        404,
        "artifact_not_found",
        f"There is no artifact {printable(path, 100)}; list this run's artifacts to see their paths.",
    )


def files(
    folder: Path, is_wanted: Callable[[str], bool] = lambda _: True
) -> tuple[list[tuple[str, os.stat_result]], int]:
    """Return the regular files below `folder`, sorted by path, with their status, and the number of those left out.

    Links are not followed. A path that is not plain text is left out: it would control the terminals in which the file
    is listed, and archives and other systems would read it as another one.

    Raises:
        ApiError: 404 if the folder is missing, 409 if it has more than `MAX_FILES` files and folders.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise ApiError(
            404,
            "artifacts_missing",
            "The files are not in the storage: they were removed, or the API and the workers have different values of "
            "ANNEAL_STORAGE.",
        )
    found: list[tuple[str, os.stat_result]] = []
    seen = left_out = 0
    for path, status in entries_below(folder):
        if not is_wanted(path):
            continue
        seen += 1
        if seen > MAX_FILES:
            raise ApiError(
                409,
                "too_many_artifacts",
                f"There are more than {MAX_FILES:,} files and folders, too many to list: download them one by one by "
                "their paths, or copy them from the storage.",
            )
        if status is not None and _is_plain(path):
            found.append((path, status))
        elif status is not None:
            left_out += 1
    return sorted(found), left_out


def _is_plain(path: str) -> bool:
    """Return True for a path in UTF-8 without control characters, direction marks and backslashes."""
    return plain_line(path) == path and not {"\t", "\\"} & set(path)
