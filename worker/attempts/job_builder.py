"""Job of a training process: resolved from a claimed run and written as a file into its attempt's folder."""

import logging
import os
import pwd
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Executable, and_, select

from anneal.contracts.attempt.device import AssignedDevice
from anneal.contracts.attempt.job import (
    EXPORT,
    MERGED_BASE,
    DataSource,
    JobSpec,
    ModelSource,
    ResumePoint,
    TokenCacheLocation,
    TrackerServers,
    TrainedWeights,
    WorkerInfo,
)
from anneal.contracts.attempt.messages import ActionRequest
from anneal.contracts.methods import method_of, rewards_of
from anneal.contracts.run_task import RunTask
from app.base_models import resolver
from app.base_models.model_folder import ModelFolder
from app.config import wandb_mode
from app.infra.files.object_store import StoreUnavailable, WrongStore
from app.infra.files.untrusted_folder import create_below
from app.runs.state.actions.replay import done_after
from app.secrets import store
from app.secrets.keyring import KeyringError
from app.tables.datasets import Dataset
from app.tables.runs import Attempt, Run
from worker.attempts import auto_repair
from worker.attempts.checkpoint_source import CheckpointSource
from worker.attempts.job_error import JobError, storage_unavailable
from worker.checkpoint_store import cleanup
from worker.checkpoint_store.remote_store import CorruptInStore, MissingInStore
from worker.checkpoint_store.restore import RestoreControl
from worker.checkpoint_store.working_copy import WorkingCopy
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext

log = logging.getLogger(__name__)

_TRACKER_SECRETS = {
    "wandb": {store.WANDB_API_KEY: "WANDB_API_KEY"},
    "mlflow": {"mlflow_tracking_token": "MLFLOW_TRACKING_TOKEN"},
}
"""Secrets of each tracker, with the environment variables in which its library expects them."""
_MAX_PREPARATION_SECONDS = 6 * 3600.0
"""Enough to read a terabyte from a slow disk; a sparse file of a hostile trainer takes for ever."""


@dataclass(frozen=True)
class Job:
    """Job file, and the facts about it that the supervisor needs."""

    path: Path
    start_step: int
    start_epoch: float
    best_loss: float | None
    best_score: float | None
    remarks: list[str]
    """Lines for the run's log: checkpoints that were skipped, and why."""
    config: dict[str, Any]
    """Configuration that the attempt trains: that of the run, with repairs applied."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment variables for the training process alone; they are written to no file."""


def prepare_job(
    context: WorkerContext, run: ClaimedRun, device: AssignedDevice, restore_control: RestoreControl
) -> Job:
    """Resolve dataset, base model and checkpoint of a claimed run and write its job file.

    Raises:
        JobError: Something that the run needs is missing.
        TransferCancelled: The run is to end or to be released.
        OSError: The storage cannot be read or written.
    """
    folder = context.storage.attempt_dir(run.id, run.attempt)
    restore_control = restore_control.with_time_limit(_MAX_PREPARATION_SECONDS)
    if context.working_copy is not None:
        _check_store(context, run, context.working_copy)
        context.working_copy.use_entry(run.id, folder, restore_control.raise_if_ended)
    # Checked first: a worker that does not see the dataset does not see the checkpoints either, and must not mark them
    # as corrupt.
    dataset = dataset_source(context, run, run.dataset_id, restore_control)
    evaluation = dataset_source(context, run, run.eval_dataset_id, restore_control) if run.eval_dataset_id else None
    extra = {
        name: dataset_source(context, run, id, restore_control) for name, id in sorted(run.extra_eval_datasets.items())
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    cleanup.before_attempt(context, run)
    remarks: list[str] = []
    with context.engine.connect() as connection:
        repaired = auto_repair.previous_repairs(connection, run.id)
    source = CheckpointSource(context, run, restore_control)
    checkpoint = weights = None
    match run.task:
        case RunTask.train:
            checkpoint = source.obtain_newest(remarks)
        case RunTask.evaluate:
            weights = _evaluated_weights(context, run, source, restore_control)
        case RunTask.export:
            checkpoint = source.obtain_chosen()
    config, changed = auto_repair.apply_repairs(run.config, repaired)
    best_checkpoint = source.obtain_best_evaluated()
    if run.backend != "fake":
        for name in (run.config["base_model"], *([] if run.task is RunTask.export else reward_model_names(run))):
            fetch_output(context, run, name, restore_control)
    with context.engine.connect() as connection:
        base_model = base_model_source(context, connection, run)
        reward_models = [] if run.task is RunTask.export else reward_model_sources(context, connection, run)
        tokenizer = tokenizer_source(context, run)
        secrets = secrets_of(context, connection, run.config, [base_model, *reward_models, *filter(None, [tokenizer])])
        replayed = connection.execute(done_after(run.id, checkpoint.step if checkpoint else 0)).scalar_one()
        job = JobSpec(
            run_id=run.id,
            task=run.task,
            attempt=run.attempt,
            backend=run.backend,
            config=config,
            user_set_fields=frozenset({*run.user_set_fields, *changed}),
            auto_repairs=repaired,
            dataset=dataset,
            eval_dataset=evaluation,
            extra_eval_datasets=extra,
            base_model=base_model,
            tokenizer=tokenizer,
            reward_models=reward_models,
            attempt_dir=folder,
            token_cache=token_cache_location(context),
            disk_reserve_bytes=context.settings.disk_reserve_bytes,
            resume_from=_resume_point(source, checkpoint),
            best_checkpoint=best_checkpoint,
            weights=weights,
            replayed_actions=[ActionRequest(**one) for one in replayed],
            journal=journal_path(context, run),
            sharded=bool(run.requirements.get("sharded")),
            sequence_parallel=run.requirements.get("sequence_parallel", 1),
            shares_folder=context.working_copy is None,
            expert_parallel=run.requirements.get("expert_parallel", 1),
            device=device,
            trust_remote_code=context.settings.trust_remote_code,
            hub_allowed=context.settings.allow_hub,
            gguf_converter=context.settings.gguf_converter,
            trackers=TrackerServers(mlflow_tracking_uri=context.settings.mlflow_tracking_uri, wandb_mode=wandb_mode()),
            worker=WorkerInfo(id=context.id, host=context.name),
        )
    return Job(
        path=write_job(context, job),
        start_step=checkpoint.step if checkpoint else 0,
        start_epoch=checkpoint.epoch if checkpoint else 0.0,
        best_loss=checkpoint.metrics.get("best_loss") if checkpoint else None,
        best_score=_best_score(config, checkpoint.metrics if checkpoint else {}),
        remarks=remarks,
        config=config,
        secrets=secrets,
    )


def _best_score(config: dict[str, Any], metrics: Mapping[str, Any]) -> float | None:
    """Return the score of the best evaluation up to a checkpoint."""
    method = method_of(config)
    best = metrics.get(f"best_{method.eval_metric}")
    return None if best is None else method.to_score(best)


def write_job(context: WorkerContext, job: JobSpec) -> Path:
    """Create the attempt's folder and its job file.

    The worker keeps ownership of the run's folder, so that a trainer that runs as another user cannot interfere with
    what is written here. What the trainer writes is given to its user last: its attempt's folder and a journal.
    """
    folder = job.attempt_dir
    path = folder / "job.json"
    folder.mkdir(exist_ok=True)
    try:
        file = os.fdopen(create_below(folder, path.name), "w")
    except FileExistsError:
        return path  # an earlier try got this far before the database became unavailable
    with file:
        file.write(job.to_json())
    user = context.settings.trainer_user
    if user:
        account = pwd.getpwnam(user)
        if job.journal is not None:
            journal = os.open(job.journal, os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
            try:
                os.fchown(journal, account.pw_uid, account.pw_gid)
            finally:
                os.close(journal)
        os.chown(folder, account.pw_uid, account.pw_gid, follow_symlinks=False)
    return path


def journal_path(context: WorkerContext, run: ClaimedRun) -> Path | None:
    """Return the file in which the run's trainers record what they do; None unless the settings ask for it."""
    return context.storage.journal_path(run.id) if context.settings.trainer_journal else None


def token_cache_location(context: WorkerContext) -> TokenCacheLocation | None:
    """Return the folder in which trainers share tokenized data; None if it is disabled or cannot be created.

    It belongs to the user that trains, and no other user may read or write it, because one trainer trains on what
    another one left there. The worker keeps ownership of the parent folder, as of a run's folder.
    """
    user, limit = context.settings.trainer_user, context.settings.token_cache_bytes
    if limit == 0:
        return None
    folder = context.storage.token_cache(user)
    try:
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if user:
            account = pwd.getpwnam(user)
            os.chown(folder, account.pw_uid, account.pw_gid, follow_symlinks=False)
    except OSError as error:
        log.warning("tokenized data is not cached: %s", error)
        return None
    return TokenCacheLocation(folder=folder, limit_bytes=limit)


def dataset_source(context: WorkerContext, run: ClaimedRun, dataset_id: str, control: RestoreControl) -> DataSource:
    """Return a dataset of a run, fetched from the object store if there is one."""
    (row,) = _fetch_rows(context.engine, select(Dataset.__table__).where(Dataset.id == dataset_id))
    path = context.storage.dataset_file(row.id, row.extension)
    if (copy := context.working_copy) is not None:
        with _store_errors(context, run, f"the file of dataset {row.id}", "bad_data", "upload it again"):
            copy.fetch_dataset(run.id, path, row.bytes, row.sha256, control.raise_if_ended)
    if not path.is_file():
        raise JobError(
            "bad_data",
            f"the file of dataset {row.id} is not in this worker's storage ({context.storage.root}): "
            "set the same ANNEAL_STORAGE for API and workers",
            is_transient=True,
        )
    return DataSource(id=row.id, path=path, format=row.format, rows=row.rows, sha256=row.sha256)


def base_model_source(context: WorkerContext, connection: Connection, run: ClaimedRun) -> ModelSource:
    """Locate the base model of a run."""
    return _locate_model(context, connection, run, run.config["base_model"], run.config.get("revision"))


def tokenizer_source(context: WorkerContext, run: ClaimedRun) -> ModelSource | None:
    """Locate the tokenizer of another model; None if the run uses that of its base model."""
    if (name := run.config.get("tokenizer")) is None or run.backend == "fake":
        return None
    return _resolve_model_source(lambda: resolver.locate_tokenizer(context.settings, context.storage, name))


def reward_model_sources(context: WorkerContext, connection: Connection, run: ClaimedRun) -> list[ModelSource]:
    """Return the models of the rewards of type `model`, in the order of these rewards."""
    return [_locate_model(context, connection, run, model) for model in reward_model_names(run)]


def reward_model_names(run: ClaimedRun) -> list[str]:
    """Return the names of the models of the rewards of type `model`."""
    return [reward["model"] for _, reward in rewards_of(run.config) if reward["type"] == "model"]


def _check_store(context: WorkerContext, run: ClaimedRun, copy: WorkingCopy) -> None:
    """Raise `JobError` unless the object store could take what the attempt will write."""
    try:
        copy.check_store()
    except StoreUnavailable as error:
        # An attempt would train its last steps again, only to wait for the storage once more.
        reason = f"the storage {context.settings.storage_url} cannot be used now ({error})"
        is_refused = error.is_refused or isinstance(error, WrongStore)
        raise storage_unavailable(context.engine, run, reason, is_refused=is_refused) from error


@contextmanager
def _store_errors(context: WorkerContext, run: ClaimedRun, what: str, code: str, advice: str) -> Iterator[None]:
    """Convert errors of a fetch to `JobError`."""
    try:
        yield
    except StoreUnavailable as error:
        reason = f"{what} cannot be fetched now ({error})"
        raise storage_unavailable(context.engine, run, reason, is_refused=error.is_refused) from error
    except (MissingInStore, CorruptInStore) as error:
        # This worker may have another ANNEAL_STORAGE than the API, so that others may find it.
        how = "is not in" if isinstance(error, MissingInStore) else f"is not what was stored ({error}) in"
        message = f"{what} {how} the storage of this worker ({context.settings.storage_url}): set the same "
        message += f"ANNEAL_STORAGE for API and workers; if it is the same, {advice}"
        raise JobError(code, message, is_transient=True) from error


def fetch_output(context: WorkerContext, run: ClaimedRun, name: str, control: RestoreControl) -> None:
    """Fetch the output that a model names, and that of its base, from the object store, if there is one."""
    copy = context.working_copy
    while copy is not None and resolver.is_run(name):
        written_by = and_(Attempt.run_id == Run.id, Attempt.attempt == Run.output_attempt)
        query = select(Run.output_attempt, Run.base_model, Attempt.output_sha256).join(Attempt, written_by)
        producer = next(iter(_fetch_rows(context.engine, query.where(Run.id == name))), None)
        if producer is None or producer.output_sha256 is None:
            return  # the search for the model says what is missing
        with _store_errors(context, run, f"the output of run {name}", "model_not_found", "resume that run"):
            owner = (name, producer.output_attempt)
            output = copy.fetch_output(run.id, owner, producer.output_sha256, context.id, control.raise_if_ended)
        described = ModelFolder(context.storage, output).read_json("adapter_config.json")
        if described.get("base_model_name_or_path", MERGED_BASE) == MERGED_BASE:
            return
        name = producer.base_model


def _locate_model(
    context: WorkerContext,
    connection: Connection,
    run: ClaimedRun,
    name: str,
    revision: str | None = None,
    *,
    follow: bool = True,
) -> ModelSource:
    """Locate a model by its name; with `follow`, also the base of an adapter."""
    if run.backend == "fake":
        return ModelSource(name=name, path=None, hub=name if resolver.is_hub_name(name) else None, revision=None)
    output_attempt, trained_on = None, None
    if resolver.is_run(name):
        query = select(Run.output_attempt, Run.base_model).where(Run.id == name)
        output_attempt, trained_on = connection.execute(query).one_or_none() or (None, None)
    model = _resolve_model_source(
        lambda: resolver.locate_model(context.settings, context.storage, name, output_attempt, revision)
    )
    base = _base_of_adapter(context, connection, run, model.path, trained_on) if model.path and follow else None
    return model.model_copy(update={"base": base})


def _resolve_model_source(locate: Callable[[], resolver.ModelLocation]) -> ModelSource:
    try:
        return ModelSource.model_validate(locate())
    except resolver.BaseModelError as error:
        code = "config_error" if error.code == "model_not_allowed" else "model_not_found"
        raise JobError(code, error.message) from error


def _base_of_adapter(
    context: WorkerContext, connection: Connection, run: ClaimedRun, adapter: Path, trained_on: str | None
) -> ModelSource | None:
    """Locate the base of an adapter; None if `adapter` is a whole model, or its base is on the hub or an absolute path.

    `trained_on` is `base_model` of the run whose output it is: the adapter names its base without a folder of this
    server, and several models roots may have one of that name. A downloaded output is named by its folder, not by its
    run. A base that is an adapter itself is part of the output, merged.
    """
    folder = ModelFolder(context.storage, adapter)
    described = folder.read_json("adapter_config.json")
    name, revision = described.get("base_model_name_or_path"), described.get("revision")
    if not isinstance(name, str):
        return None
    if trained_on is None and not resolver.is_run(name):
        path = resolver.base_folder(context.settings, context.storage, folder, name)
        return None if path is None else ModelSource(name=name, path=path, hub=None, revision=None)
    if name == MERGED_BASE:
        return ModelSource(name=name, path=adapter / MERGED_BASE, hub=None, revision=None)
    pinned = revision if isinstance(revision, str) else None
    return _locate_model(context, connection, run, trained_on or name, pinned, follow=False)


def secrets_of(
    context: WorkerContext, connection: Connection, config: Mapping[str, Any], models: Sequence[ModelSource]
) -> dict[str, str]:
    """Return the secrets that this run needs and that are set, by the environment variable that libraries read."""
    variables: dict[str, str] = {}
    # An adapter names its own base model, which may be on the hub.
    is_on_hub = (it.hub or (it.path and (it.path / "adapter_config.json").is_file()) for it in models)
    needs_hub = config.get("push_to_hub") or any(is_on_hub)
    if context.settings.allow_hub and needs_hub:
        variables[store.HF_TOKEN] = "HF_TOKEN"
    for tracker in config.get("report_to", ()):
        variables |= _TRACKER_SECRETS.get(tracker, {})
    try:
        return (
            {
                variables[name]: value
                for name, value in store.read_secrets(connection, context.settings, variables).items()
            }
            if variables
            else {}
        )
    except KeyringError as error:
        raise JobError("internal", str(error), is_transient=True) from error


def _resume_point(source: CheckpointSource, checkpoint: Any) -> ResumePoint | None:
    if checkpoint is None:
        return None
    return ResumePoint(
        path=source.folder_of(checkpoint), step=checkpoint.step, manifest_sha256=checkpoint.manifest_sha256
    )


def _evaluated_weights(
    context: WorkerContext, run: ClaimedRun, source: CheckpointSource, control: RestoreControl
) -> TrainedWeights | None:
    """Return the weights that a run evaluates; None for those of the base model.

    Raises:
        JobError: They no longer exist, or are not reachable now.
    """
    if run.resume_checkpoint_id is None:
        if run.base_run_id is None or run.base_run_id == run.config["base_model"]:
            return None  # what is evaluated is the base model itself
        fetch_output(context, run, run.base_run_id, control)
        return _evaluated_output(context, run.base_run_id)
    checkpoint = source.obtain_chosen()
    return TrainedWeights(path=source.folder_of(checkpoint), step=checkpoint.step, epoch=checkpoint.epoch)


def _evaluated_output(context: WorkerContext, run_id: str) -> TrainedWeights:
    query = select(Run.output_attempt, Run.current_step, Run.current_epoch).where(Run.id == run_id)
    trained = _fetch_rows(context.engine, query)[0]
    place = context.storage.output_dir(run_id, trained.output_attempt)
    if not place.is_dir():
        message = f"the output of run {run_id} is not in this worker's storage ({context.storage.root}); evaluate one "
        raise JobError("model_not_found", message + "of its checkpoints, or resume the run to create it again")
    last, step = trained.current_step, ModelFolder(context.storage, place).read_json(EXPORT).get("step")
    if not isinstance(step, int) or not 0 < step < last:
        return TrainedWeights(path=place, step=last, epoch=trained.current_epoch)
    return TrainedWeights(path=place, step=step, epoch=trained.current_epoch * step / last)


def _fetch_rows(engine: Engine, statement: Executable) -> Sequence[Any]:
    with engine.connect() as connection:
        return connection.execute(statement).all()
