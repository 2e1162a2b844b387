"""Access to the output files of a run."""

import os
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.errors import ApiError, not_found, printable
from app.contracts.run_status import TERMINAL
from app.contracts.schemas.artifacts import Artifact
from app.infra.storage import Storage
from app.infra.untrusted_folder import OutsideStorage, entries_below, open_below
from app.tables.runs import Run

RECORDS = frozenset({"metrics.jsonl", "distributions.jsonl", "memory_profile.jsonl", "memory_snapshot.pickle"})
"""Files in an attempt's folder that record its training."""
_TENSORBOARD = "tensorboard/"


async def output_folder(session: AsyncSession, storage: Storage, run_id: str) -> Path:
    """Return the output folder of a run; raise 404 with the reason if there is none."""
    query = select(Run.status, Run.output_attempt).where(Run.id == run_id)
    run = (await session.execute(query)).one_or_none()
    if run is None:
        raise not_found("run", run_id)
    if run.output_attempt is None:
        reason = (
            f"it ended as {run.status} without output; resume the run to finish it"
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


def listed_records(folder: Path) -> list[Artifact]:
    """Return the records in an attempt's folder, sorted by path; links are neither followed nor listed."""
    return [one for one in listed(folder) if is_record(one.path)]


def open_record(folder: Path, path: str) -> int:
    """Open a record of an attempt and return its descriptor; raise 404 for any other file."""
    if not is_record(path):
        raise _no_such_artifact(path)
    return open_file(folder, path)


def listed(folder: Path) -> list[Artifact]:
    """Return all files below `folder`, sorted by path; links are neither followed nor listed."""
    found = (Artifact(path=path, bytes=status.st_size) for path, status in files(folder))
    return sorted(found, key=lambda file: file.path)


def open_file(folder: Path, path: str) -> int:
    """Open the file at `path` below `folder` and return its descriptor; raise 404 unless it is a regular file inside.

    The training process owns this folder, so its content is untrusted and can change at any time.
    """
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


def files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path of each regular file below `folder` with its status, unordered; links are not followed."""
    if folder.is_symlink() or not folder.is_dir():
        raise ApiError(
            404,
            "artifacts_missing",
            "The files are not in the storage: they were removed, or the API and the workers have different values of "
            "ANNEAL_STORAGE.",
        )
    return ((path, status) for path, status in entries_below(folder) if status is not None)
