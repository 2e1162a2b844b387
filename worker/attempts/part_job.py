"""Job of a part of a run on several hosts that share no folder: the lead's, with what is fetched to this worker."""

import time
from pathlib import Path

from sqlalchemy import select

from app.contracts.attempt.job import JobSpec, TrainedWeights
from app.contracts.run_task import RunTask
from app.infra.storage import Storage
from app.tables.checkpoints import Checkpoint
from worker.attempts.job_builder import (
    JobError,
    base_model_source,
    dataset_source,
    fetch_output,
    keeping,
    reward_model_names,
    reward_model_sources,
    token_cache_location,
    write_job,
)
from worker.checkpoint_files import manifest
from worker.checkpoint_store import restore
from worker.checkpoint_store.restore import RestoreControl, RestoreOutcome
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext

_LOOK_SECONDS = 0.5


def prepare_part(context: WorkerContext, run: ClaimedRun, lead: JobSpec, control: RestoreControl) -> Path:
    """Fetch what the job of the lead names, and write the job of this worker; return its file.

    Raises:
        JobError: Something cannot be fetched.
        TransferCancelled: The attempt is to end.
        OSError: The storage of this worker cannot be read or written.
    """
    assert context.working_copy is not None  # noqa: S101
    folder = context.storage.attempt_dir(run.id, run.attempt)
    context.working_copy.use(run.id, folder, control.check)
    folder.parent.mkdir(parents=True, exist_ok=True)
    datasets = {source.id: dataset_source(context, run, source.id, control) for source in lead.datasets}
    resume, weights = lead.resume_from, lead.weights
    if resume is not None:
        path = _checkpoint(context, run, lead, resume.path, resume.manifest_sha256, control)
        resume = resume.model_copy(update={"path": path})
    if weights is not None:
        weights = _weights(context, run, lead, weights, control)
    models = [run.config["base_model"], *([] if run.task is RunTask.export else reward_model_names(run))]
    for name in models:
        fetch_output(context, run, name, control)
    with context.engine.connect() as connection:
        base_model = base_model_source(context, connection, run)
        reward_models = [] if run.task is RunTask.export else reward_model_sources(context, connection, run)
    own = {
        "dataset": datasets[lead.dataset.id],
        "eval_dataset": None if lead.eval_dataset is None else datasets[lead.eval_dataset.id],
        "extra_eval_datasets": {name: datasets[one.id] for name, one in lead.extra_eval_datasets.items()},
        "base_model": base_model,
        "reward_models": reward_models,
        "attempt_dir": folder,
        "journal": context.storage.journal(run.id),
        "token_cache": token_cache_location(context),
        "resume_from": resume,
        "weights": weights,
    }
    return write_job(context, lead.model_copy(update=own))


def _here(storage: Storage, lead: JobSpec, path: Path) -> Path:
    """Return the place here of a file in the storage of the lead, whose layout is the same."""
    root = lead.attempt_dir.parents[2]
    return storage.root / path.relative_to(root)


def _weights(
    context: WorkerContext, run: ClaimedRun, lead: JobSpec, weights: TrainedWeights, control: RestoreControl
) -> TrainedWeights:
    """Fetch the weights that the run evaluates: a checkpoint, or the output of a run."""
    place = _here(context.storage, lead, weights.path)
    if run.resume_checkpoint_id is None:
        fetch_output(context, run, place.parents[1].name, control)
    else:
        query = select(Checkpoint.manifest_sha256).where(Checkpoint.id == run.resume_checkpoint_id)
        with context.engine.connect() as connection:
            sha256 = connection.execute(query).scalar_one()
        _checkpoint(context, run, lead, weights.path, sha256, control)
    return weights.model_copy(update={"path": place})


def _checkpoint(
    context: WorkerContext, run: ClaimedRun, lead: JobSpec, path: Path, sha256: str, control: RestoreControl
) -> Path:
    """Fetch a checkpoint of the lead, which may still be about to send it; return its folder here."""
    place = _here(context.storage, lead, path)
    own = (Checkpoint.run_id, place.parents[1].name), (Checkpoint.attempt, int(place.parent.name.removeprefix("a")))
    query = select(Checkpoint.__table__).where(*(column == value for column, value in own))
    until = time.monotonic() + context.settings.hang_seconds
    with keeping(context, run, place, control):
        while wrong := manifest.verify(place, sha256, control.check):
            with context.engine.connect() as connection:
                saved = connection.execute(query.where(Checkpoint.name == place.name)).one()
            if saved.replicated_at is None and time.monotonic() < until:
                control.check()
                time.sleep(_LOOK_SECONDS)
                continue
            fetched = restore.restore_checkpoint(context, run, saved, place, wrong, control)
            if fetched.outcome is RestoreOutcome.WHOLE:
                break
            message = f"checkpoint {saved.id}, from which the run continues, cannot be fetched: {fetched.why}"
            raise JobError("storage_unavailable", message, is_transient=True)
    return place
