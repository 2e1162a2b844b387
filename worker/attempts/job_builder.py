"""Job of a training process: resolved from a claimed run and written as a file into its attempt's folder."""

import logging
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from sqlalchemy import Connection

from anneal.contracts.attempt.device import AssignedDevice
from anneal.contracts.attempt.job import (
    JobSpec,
    ResumePoint,
    TokenCacheLocation,
    TrackerServers,
    TrainedWeights,
    WorkerInfo,
)
from anneal.contracts.attempt.messages import ActionRequest
from anneal.contracts.methods import method_of, service_urls
from anneal.contracts.rewards import RewardHost, find_host
from anneal.contracts.run_task import RunTask
from app.config import wandb_mode
from app.infra.files.untrusted_folder import create_below
from app.runs.state.actions.replay import done_after
from app.secrets import store
from app.secrets.keyring import KeyringError
from worker.attempts import auto_repair
from worker.attempts.checkpoint_source import CheckpointSource
from worker.attempts.job_error import JobError
from worker.attempts.job_inputs import JobInputs
from worker.checkpoint_store import cleanup
from worker.checkpoint_store.restore import RestoreControl
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext
from worker.ingest.attempt_state import StartPoint

log = logging.getLogger(__name__)

_TRACKER_SECRETS = {
    "wandb": {"WANDB_API_KEY": store.WANDB_API_KEY},
    "mlflow": {"MLFLOW_TRACKING_TOKEN": "mlflow_tracking_token"},
}
"""Secrets of each tracker, by the environment variables in which its library expects them."""
_MAX_PREPARATION_SECONDS = 6 * 3600.0
"""Enough to read a terabyte from a slow disk; a sparse file of a hostile trainer takes for ever."""


@dataclass(frozen=True)
class Job:
    """Job file, and the facts about it that the supervisor needs."""

    path: Path
    start: StartPoint
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
    control = restore_control.with_time_limit(_MAX_PREPARATION_SECONDS)
    inputs, source = JobInputs(context, run, control), CheckpointSource(context, run, control)
    if context.working_copy is not None:
        inputs.check_store(context.working_copy)
        context.working_copy.use_entry(run.id, inputs.folder, control.raise_if_ended)
    # Checked first: a worker that does not see the dataset does not see the checkpoints either, and must not mark them
    # as corrupt.
    datasets = inputs.fetch_datasets(run.dataset_id, run.eval_dataset_id, run.extra_eval_datasets)
    inputs.folder.parent.mkdir(parents=True, exist_ok=True)
    cleanup.before_attempt(context, run)
    remarks: list[str] = []
    checkpoint, weights = _obtain_start(run, inputs, source, remarks)
    best_checkpoint = source.obtain_best_evaluated()
    models = inputs.fetch_models()
    settings = context.settings
    with context.engine.connect() as connection:
        repairs = auto_repair.previous_repairs(connection, run.id)
        config, changed = auto_repair.apply_repairs(run.config, repairs)
        replayed = connection.execute(done_after(run.id, checkpoint.step if checkpoint else 0)).scalar_one()
        job = JobSpec(
            run_id=run.id,
            task=run.task,
            attempt=run.attempt,
            backend=run.backend,
            config=config,
            user_set_fields=frozenset({*run.user_set_fields, *changed}),
            auto_repairs=repairs,
            **datasets,
            **models,
            reward_hosts=find_reward_hosts(context, config),
            **worker_fields(context, inputs),
            resume_from=_resume_point(source, checkpoint),
            best_checkpoint=best_checkpoint,
            weights=weights,
            replayed_actions=[ActionRequest(**one) for one in replayed],
            sharded=bool(run.requirements.get("sharded")),
            sequence_parallel=run.requirements.get("sequence_parallel", 1),
            expert_parallel=run.requirements.get("expert_parallel", 1),
            shares_folder=context.working_copy is None,
            serve_idle_seconds=settings.serve_idle_seconds,
            device=device,
            disk_reserve_bytes=settings.disk_reserve_bytes,
            trust_remote_code=settings.trust_remote_code,
            hub_allowed=settings.allow_hub,
            gguf_converter=settings.gguf_converter,
            gguf_quantizer=settings.gguf_quantizer,
            trackers=TrackerServers(mlflow_tracking_uri=settings.mlflow_tracking_uri, wandb_mode=wandb_mode()),
            worker=WorkerInfo(id=context.id, host=context.name),
        )
        secrets = read_secrets(context, connection, job)
    return Job(write_job(context, job), _start_point(run, checkpoint), remarks, config, secrets)


def _obtain_start(
    run: ClaimedRun, inputs: JobInputs, source: CheckpointSource, remarks: list[str]
) -> tuple[Any, TrainedWeights | None]:
    """Return the checkpoint that the attempt resumes from or exports, and the weights that it uses unchanged.

    Without these, it starts from the beginning, or uses the base model.
    """
    checkpoint, weights = None, None
    match run.task:
        case RunTask.train:
            checkpoint = source.obtain_newest(remarks)
        case RunTask.export:
            checkpoint = source.obtain_chosen(run.resume_checkpoint_id)
        case RunTask.evaluate | RunTask.predict | RunTask.serve:
            chosen = source.obtain_weights()
            if chosen is None:
                weights = inputs.fetch_trained_output()
            else:
                weights = TrainedWeights(path=source.folder_of(chosen), step=chosen.step, epoch=chosen.epoch)
            if run.task == RunTask.predict:
                checkpoint = source.obtain_newest(remarks)
    return checkpoint, weights


def _resume_point(source: CheckpointSource, checkpoint: Any) -> ResumePoint | None:
    if checkpoint is None:
        return None
    return ResumePoint(
        path=source.folder_of(checkpoint), step=checkpoint.step, manifest_sha256=checkpoint.manifest_sha256
    )


def _start_point(run: ClaimedRun, checkpoint: Any) -> StartPoint:
    """Return the position of a checkpoint in the run, with the best loss and the best evaluation up to it."""
    if checkpoint is None:
        return StartPoint(0, 0.0, None)
    method, metrics = method_of(run.config), checkpoint.metrics
    best = metrics.get(f"best_{method.eval_metric}")
    best_score = None if best is None else method.to_score(best)
    return StartPoint(checkpoint.step, checkpoint.epoch, metrics.get("best_loss"), best_score)


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


class WorkerFields(TypedDict):
    """Fields of a job that name folders of this worker."""

    attempt_dir: Path
    journal: Path | None
    token_cache: TokenCacheLocation | None


def worker_fields(context: WorkerContext, inputs: JobInputs) -> WorkerFields:
    """Return the folders in which the trainers of an attempt write; the journal only if the settings ask for it."""
    journal = context.storage.journal_path(inputs.run.id) if context.settings.trainer_journal else None
    return {"attempt_dir": inputs.folder, "journal": journal, "token_cache": _token_cache_location(context)}


def _token_cache_location(context: WorkerContext) -> TokenCacheLocation | None:
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


def read_secrets(context: WorkerContext, connection: Connection, job: JobSpec) -> dict[str, str]:
    """Return the secrets that a job needs and that are set, by environment variable.

    Raises:
        JobError: They cannot be read, or the key of a host that rewards call is not set.
    """
    variables: dict[str, str] = {}
    config: Mapping[str, Any] = job.config
    models = [*job.models, *([job.tokenizer] if job.tokenizer else [])]
    # An adapter names its own base model, which may be on the hub.
    is_on_hub = (it.hub or (it.path and (it.path / "adapter_config.json").is_file()) for it in models)
    if context.settings.allow_hub and (config.get("push_to_hub") or any(is_on_hub)):
        variables["HF_TOKEN"] = store.HF_TOKEN
    for tracker in config.get("report_to", ()):
        variables |= _TRACKER_SECRETS.get(tracker, {})
    keys = {host.key_variable: host.secret for host in job.reward_hosts if host.key_variable and host.secret}
    variables |= keys
    try:
        values = store.read_secrets(connection, context.settings, variables.values()) if variables else {}
    except KeyringError as error:
        raise JobError("internal", str(error), is_transient=True) from error
    if missing := sorted({secret for secret in keys.values() if secret not in values}):
        message = f"the secret `{missing[0]}`, which a reward needs, is not set: an admin sets it with "
        raise JobError("config_error", f"{message}`anneal secrets set {missing[0]}`; then resume the run")
    return {variable: values[name] for variable, name in variables.items() if name in values}


def find_reward_hosts(context: WorkerContext, config: Mapping[str, Any]) -> list[RewardHost]:
    """Return the hosts that the rewards of a configuration call.

    Raises:
        JobError: The settings of this worker do not allow one of them.
    """
    allowed = context.settings.allowed_reward_hosts
    hosts: list[RewardHost] = []
    for place, url in service_urls(config):
        address, host = find_host(allowed, url)
        if host is None:
            message = f"`{place}` calls {address}, which this worker does not allow: its operator can add it to "
            raise JobError("config_error", f"{message}ANNEAL_REWARD_HOSTS, or ANNEAL_REWARD_PRIVATE_HOSTS")
        if host not in hosts:
            hosts.append(host)
    return hosts
