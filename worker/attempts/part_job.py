"""Job of a part of a run on several hosts that share no folder: the lead's, with what is fetched to this worker."""

import time
from pathlib import Path

from sqlalchemy import select

from anneal.contracts.attempt.job import JobSpec, TrainedWeights
from anneal.contracts.run_task import RunTask
from app.infra.storage import Storage
from app.tables.checkpoints import Checkpoint
from worker.attempts.checkpoint_source import CheckpointSource
from worker.attempts.job_builder import (
    base_model_source,
    dataset_source,
    fetch_output,
    journal_path,
    reward_model_names,
    reward_model_sources,
    token_cache_location,
    write_job,
)
from worker.attempts.job_error import STORAGE_UNAVAILABLE, JobError
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
    context.working_copy.use_entry(run.id, folder, control.raise_if_ended)
    folder.parent.mkdir(parents=True, exist_ok=True)
    datasets = {source.id: dataset_source(context, run, source.id, control) for source in lead.datasets}
    resume, weights = lead.resume_from, lead.weights
    if resume is not None:
        place = _local_path(context.storage, lead, resume.path)
        _fetch_checkpoint(context, run, place, control)
        resume = resume.model_copy(update={"path": place})
    if weights is not None:
        weights = _fetch_weights(context, run, lead, weights, control)
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
        "journal": journal_path(context, run),
        "token_cache": token_cache_location(context),
        "resume_from": resume,
        "weights": weights,
    }
    return write_job(context, lead.model_copy(update=own))


def _local_path(storage: Storage, lead: JobSpec, path: Path) -> Path:
    """Return the place here of a file in the storage of the lead, whose layout is the same."""
    root = lead.attempt_dir.parents[2]
    return storage.root / path.relative_to(root)


def _fetch_weights(
    context: WorkerContext, run: ClaimedRun, lead: JobSpec, weights: TrainedWeights, control: RestoreControl
) -> TrainedWeights:
    """Fetch the weights that the run evaluates: a checkpoint, or the output of a run."""
    place = _local_path(context.storage, lead, weights.path)
    if run.resume_checkpoint_id is None:
        fetch_output(context, run, place.parents[1].name, control)
    else:
        _fetch_checkpoint(context, run, place, control)
    return weights.model_copy(update={"path": place})


def _fetch_checkpoint(context: WorkerContext, run: ClaimedRun, place: Path, control: RestoreControl) -> None:
    """Fetch a checkpoint of the lead, which may still be about to send it, to its folder here."""
    run_id, attempt = place.parents[1].name, int(place.parent.name.removeprefix("a"))
    query = select(Checkpoint.__table__).where(
        Checkpoint.run_id == run_id, Checkpoint.attempt == attempt, Checkpoint.name == place.name
    )
    source = CheckpointSource(context, run, control)
    until = time.monotonic() + context.settings.hang_seconds
    while True:
        with context.engine.connect() as connection:
            saved = connection.execute(query).one()
        obtained = source.obtain(saved)
        if obtained.outcome is RestoreOutcome.WHOLE:
            return
        if saved.replicated_at is not None or time.monotonic() >= until:
            message = f"checkpoint {saved.id}, from which the run continues, cannot be fetched: {obtained.why}"
            raise JobError(STORAGE_UNAVAILABLE, message, is_transient=True)
        control.raise_if_ended()
        time.sleep(_LOOK_SECONDS)
