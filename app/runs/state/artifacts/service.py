"""Access to the output files of a run."""

from sqlalchemy import and_, select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.attempt.records import is_record
from anneal.contracts.run_status import TERMINAL
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.artifacts import Artifact, Artifacts
from app.api.errors import ApiError, conflict, not_found
from app.infra.files import file_manifest
from app.infra.storage import Storage
from app.runs.state.artifacts.folders import FileFolder, LocalFolder, StoredFolder
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Attempt, Run


async def output_folder(session: AsyncSession, storage: Storage, run_id: str) -> FileFolder:
    """Return the output folder of a run; raise 404 with the reason if there is none."""
    written_by = and_(Attempt.run_id == Run.id, Attempt.attempt == Run.output_attempt)
    columns = (Run.status, Run.task, Run.output_attempt, Run.created_at, Run.finished_at, Attempt.output_sha256)
    query = select(*columns).outerjoin(Attempt, written_by).where(Run.id == run_id)
    run = (await session.execute(query)).one_or_none()
    if run is None:
        raise not_found("run", run_id)
    if run.task == RunTask.evaluate:
        message = f"Run {run_id} is an evaluation, which has no output; its metrics are in `evaluation` of the run."
        raise ApiError(404, "no_artifacts", message)
    if run.task == RunTask.serve:
        message = f"Run {run_id} is a serving run, which has no output: its answers are sent to those who ask."
        raise ApiError(404, "no_artifacts", message)
    if run.output_attempt is None:
        way = "export the checkpoint again" if run.task == RunTask.export else "resume the run to finish it"
        reason = (
            f"it ended as {run.status} without output; {way}"
            if run.status in TERMINAL
            else f"it is {run.status}; follow /v1/runs/{run_id}/events until it ends"
        )
        raise ApiError(404, "no_artifacts", f"Run {run_id} has no output yet: {reason}.")
    folder = storage.output_dir(run_id, run.output_attempt)
    if storage.objects is None:
        return LocalFolder(folder)
    described = storage.key_of(storage.output_manifest(run_id, run.output_attempt))
    modified = (run.finished_at or run.created_at).timestamp()
    return StoredFolder(storage, storage.objects, storage.key_of(folder), described, run.output_sha256, modified)


async def attempt_folder(session: AsyncSession, storage: Storage, run_id: str, attempt: int) -> FileFolder:
    """Return the folder of an attempt of a run; raise 404 if there was no such attempt."""
    last = (await session.execute(select(Run.attempt).where(Run.id == run_id))).scalar_one_or_none()
    if last is None:
        raise not_found("run", run_id)
    if not 1 <= attempt <= last:
        raise ApiError(
            404, "attempt_not_found", f"Run {run_id} has no attempt {attempt}; it has had {last} so far, from 1 on."
        )
    folder = storage.attempt_dir(run_id, attempt)
    if storage.objects is None:
        return LocalFolder(folder, is_record)
    query = select(Attempt.records_sha256, Attempt.ended_at).where(Attempt.run_id == run_id, Attempt.attempt == attempt)
    attempt_row = (await session.execute(query)).one_or_none()
    if attempt_row is None or attempt_row.records_sha256 is None:
        raise ApiError(
            404,
            "artifacts_missing",
            f"The records of attempt {attempt} are not in the storage: its worker sends them when the attempt ends; a "
            "worker that was lost has sent none.",
        )
    described = storage.key_of(storage.records_manifest(run_id, attempt))
    modified = attempt_row.ended_at.timestamp() if attempt_row.ended_at else 0.0
    return StoredFolder(
        storage, storage.objects, storage.key_of(folder), described, attempt_row.records_sha256, modified
    )


def checkpoint_folder(storage: Storage, checkpoint: Checkpoint) -> FileFolder:
    """Return the folder of a checkpoint; raise 409 if it is not in the object store."""
    folder = storage.named_checkpoint(checkpoint.run_id, checkpoint.attempt, checkpoint.name)
    if storage.objects is None:
        return LocalFolder(folder)
    if checkpoint.replicated_at is None:
        raise conflict(
            "checkpoint_not_stored",
            f"Checkpoint {checkpoint.id} is not in the storage yet; its worker sends it there, so try again later.",
        )
    key, modified = storage.key_of(folder), checkpoint.created_at.timestamp()
    described = f"{key}/{file_manifest.MANIFEST}"
    return StoredFolder(storage, storage.objects, key, described, checkpoint.manifest_sha256, modified)


def list_artifacts(folder: FileFolder) -> Artifacts:
    """Return the files of `folder`, sorted by path; links are neither followed nor listed."""
    files, left_out = folder.list_files()
    return Artifacts(data=[Artifact(path=one.path, bytes=one.bytes) for one in files], left_out=left_out)
