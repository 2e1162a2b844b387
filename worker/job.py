"""What a training process is told: resolved from a claimed run, written as a file into its attempt's folder."""

import json
import logging
import os
import pwd
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Executable, func, select

from app.actions.replay import done_behind
from app.checkpoints import retention
from app.checkpoints.models import Checkpoint
from app.datasets.models import Dataset
from app.runs import base_models
from app.runs.config import TrainingMethod
from app.runs.models import Attempt, Run
from app.runs.plugins import has_copies
from app.secrets import store
from app.secrets.keyring import KeyringError
from worker import fetching, repairs, sweeping
from worker.fetching import Outcome, Patience
from worker.host import Host
from worker.training import manifest

log = logging.getLogger(__name__)

_OF_TRACKERS = {
    "wandb": {"wandb_api_key": "WANDB_API_KEY"},
    "mlflow": {"mlflow_tracking_token": "MLFLOW_TRACKING_TOKEN"},
}
"""Secrets of trackers, and the variables in which their libraries look for them."""
_AWAY_SECONDS = 30.0
_LONGEST_AWAY_SECONDS = 300.0
_MOST_WAITS = 80
"""Some six hours."""


class JobError(Exception):
    """The run cannot start: a stable code, and a sentence with what to do next."""

    def __init__(self, code: str, message: str, is_passing: bool = False, pause_seconds: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.is_passing = is_passing
        """Whether it is this worker's trouble: the run waits for another try, perhaps elsewhere."""
        self.pause_seconds = pause_seconds
        """For how long nobody need try again, where it is nobody's trouble, and does not count as a try."""


@dataclass(frozen=True)
class Job:
    """A job file, and what the supervisor has to know of it."""

    path: Path
    start_step: int
    start_epoch: float
    best_loss: float | None
    remarks: list[str]
    """What the user should read in the log: checkpoints that were passed over, and why."""
    config: dict[str, Any]
    """What the attempt is told to train: the run's configuration, as repaired."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables that the training process is to have, and nobody else: they are in no file."""


def prepare(host: Host, run: Any, device: dict[str, Any], patience: Patience) -> Job:
    """Resolve data, base model and checkpoint of a claimed run and write its job file.

    Raises:
        JobError: something that the run needs is not there.
        Stopped: meanwhile the run was to end.
        OSError: the storage cannot be read or written.
    """
    folder = host.storage.attempt_dir(run.id, run.attempt)
    with host.engine.connect() as connection:
        # First of all: a worker that does not see the data set does not see the checkpoints either, and may not judge
        # them.
        dataset = _dataset(host, connection, run.dataset_id)
        evaluation = _dataset(host, connection, run.eval_dataset_id) if run.eval_dataset_id else None
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweeping.before_attempt(host, run)
    remarks: list[str] = []
    with host.engine.connect() as connection:
        repaired = repairs.earlier(connection, run.id)
    checkpoint = _newest_good(host, run, remarks, patience)
    config, changed = repairs.apply(run.config, repaired)
    with host.engine.connect() as connection:
        base_model = _base_model(host, connection, run)
        reward_models = _reward_models(host, connection, run)
        secrets = _secrets(host, connection, run, [base_model, *reward_models])
        job = {
            "run_id": run.id,
            "attempt": run.attempt,
            "backend": run.backend,
            "config": config,
            "given": sorted({*run.given, *changed}),
            "repairs": repaired,
            "dataset": dataset,
            "eval_dataset": evaluation,
            "base_model": base_model,
            "reward_models": reward_models,
            "output_dir": str(folder),
            "token_cache": _token_cache(host),
            "disk_reserve_bytes": host.settings.disk_reserve_bytes,
            "resume_from": _resume(host, checkpoint),
            "actions": connection.execute(done_behind(run.id, checkpoint.step if checkpoint else 0)).scalar_one(),
            "journal": str(host.storage.journal(run.id)),
            "device": device,
            "trust_remote_code": host.settings.trust_remote_code,
            "offline": not host.settings.allow_hub,
            "trackers": {"mlflow_tracking_uri": host.settings.mlflow_tracking_uri},
            "worker": {"id": host.id, "host": host.name},
        }
    return Job(
        path=_write(host, run.id, folder, job),
        start_step=checkpoint.step if checkpoint else 0,
        start_epoch=checkpoint.epoch if checkpoint else 0.0,
        best_loss=checkpoint.metrics.get("best_loss") if checkpoint else None,
        remarks=remarks,
        config=config,
        secrets=secrets,
    )


def _write(host: Host, run_id: str, folder: Path, job: dict[str, Any]) -> Path:
    """Make the attempt's folder and its job file.

    The run's folder stays the worker's own, so that a trainer of another user can put nothing in the way of what is
    written here; what the trainer writes is handed to it last: its attempt's folder and the journal.
    """
    path = folder / "job.json"
    if path.exists():
        return path  # an earlier try got this far before the database went away
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(job, indent=1))
    user = host.settings.trainer_user
    if user:
        account = pwd.getpwnam(user)
        journal = os.open(host.storage.journal(run_id), os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            os.fchown(journal, account.pw_uid, account.pw_gid)
        finally:
            os.close(journal)
        os.chown(folder, account.pw_uid, account.pw_gid, follow_symlinks=False)
    return path


def _token_cache(host: Host) -> dict[str, Any] | None:
    """Where trainers keep tokenised data for each other; None where there is no room for it.

    It belongs to the user that trains, and nobody else may write there or look into it: what one trainer leaves,
    another one learns from. The folder above stays the worker's own, as that of a run does.
    """
    user, limit = host.settings.trainer_user, host.settings.token_cache_bytes
    if limit == 0:
        return None
    folder = host.storage.token_cache(user)
    try:
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if user:
            account = pwd.getpwnam(user)
            os.chown(folder, account.pw_uid, account.pw_gid, follow_symlinks=False)
    except OSError as error:
        log.warning("tokenised data is not kept: %s", error)
        return None
    return {"folder": str(folder), "limit_bytes": limit}


def _dataset(host: Host, connection: Connection, dataset_id: str) -> dict[str, Any]:
    row = connection.execute(select(Dataset.__table__).where(Dataset.id == dataset_id)).one()
    path = host.storage.dataset_file(row.id, row.extension)
    if not path.is_file():
        raise JobError(
            "bad_data",
            f"the file of data set {row.id} is not in this worker's storage ({host.storage.root}): "
            "give API and workers the same ANNEAL_STORAGE",
            is_passing=True,
        )
    return {"id": row.id, "path": str(path), "format": row.format, "rows": row.rows, "sha256": row.sha256}


def _base_model(host: Host, connection: Connection, run: Any) -> dict[str, Any]:
    return _located(host, connection, run, run.config["base_model"], run.config.get("revision"))


def _reward_models(host: Host, connection: Connection, run: Any) -> list[dict[str, Any]]:
    """The models of the rewards of type `model`, in the order of these."""
    if run.config.get("method") != TrainingMethod.rlhf:
        return []
    rewards = run.config["rlhf"]["rewards"]
    return [_located(host, connection, run, reward["model"]) for reward in rewards if reward["type"] == "model"]


def _located(host: Host, connection: Connection, run: Any, name: str, revision: str | None = None) -> dict[str, Any]:
    if run.backend == "fake":
        return {"name": name, "path": None, "hub": name if base_models.is_hub_name(name) else None, "revision": None}
    output_attempt = None
    if base_models.is_run(name):
        output_attempt = connection.scalar(select(Run.output_attempt).where(Run.id == name))
    try:
        return dict(base_models.locate(host.settings, host.storage, name, output_attempt, revision))
    except base_models.BaseModelError as error:
        code = "config_error" if error.code == "model_not_allowed" else "model_not_found"
        raise JobError(code, error.message) from error


def _secrets(host: Host, connection: Connection, run: Any, models: list[dict[str, Any]]) -> dict[str, str]:
    """The secrets that this run needs, of those that are set, by the variable in which libraries look for them."""
    wanted: dict[str, str] = {}
    needs_hub = run.config.get("push_to_hub") or any(_may_be_of_the_hub(model) for model in models)
    if host.settings.allow_hub and needs_hub:
        wanted[store.HF_TOKEN] = "HF_TOKEN"
    for tracker in run.config.get("report_to", ()):
        wanted |= _OF_TRACKERS.get(tracker, {})
    if not wanted:
        return {}
    try:
        return {wanted[name]: value for name, value in store.read(connection, host.settings, wanted).items()}
    except KeyringError as error:
        raise JobError("internal", str(error), is_passing=True) from error


def _may_be_of_the_hub(model: dict[str, Any]) -> bool:
    # An adapter names its base model itself, and that may be one of the hub.
    return bool(model["hub"] or (model["path"] and (Path(model["path"]) / "adapter_config.json").is_file()))


def _resume(host: Host, checkpoint: Any) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    return {
        "path": str(host.storage.named_checkpoint(checkpoint.run_id, checkpoint.attempt, checkpoint.name)),
        "step": checkpoint.step,
        "manifest_sha256": checkpoint.manifest_sha256,
    }


def _newest_good(host: Host, run: Any, remarks: list[str], patience: Patience) -> Any:
    """The furthest checkpoint whose files all have the hashes of its manifest; None starts from the beginning.

    Whatever it may answer, `retention.retire` keeps: the furthest, and what an attempt saved that could not reach it.
    """
    elsewhere: Any = None
    out_of_reach: str | None = None
    for checkpoint in _candidates(host.engine, run):
        place = host.storage.named_checkpoint(checkpoint.run_id, checkpoint.attempt, checkpoint.name)
        if has_copies(run.config) and checkpoint.remote_at is None and not place.exists():
            elsewhere = elsewhere or checkpoint  # the trainer asks for its copy
            continue
        wrong = manifest.verify(place, checkpoint.manifest_sha256, patience.check)
        if not wrong:
            return checkpoint
        fetched = fetching.instead(host, run, checkpoint, place, wrong, patience)
        about = f"checkpoint {checkpoint.id} (step {checkpoint.step})"
        if fetched.outcome is Outcome.WHOLE:
            remarks.append(f"{about} was not whole here: {fetched.why}")
            return checkpoint
        reason = f"{about} cannot be resumed from: {fetched.why}"
        log.warning("%s: %s", run.id, reason)
        remarks.append(reason + "; taking the one before it")
        if fetched.outcome is Outcome.AWAY:
            out_of_reach = out_of_reach or reason
        if fetched.outcome is Outcome.BAD:
            with host.engine.begin() as connection:
                connection.execute(retention.mark_bad(checkpoint.id, fetched.why, run.id, run.epoch))
    if elsewhere is not None:
        return elsewhere
    if out_of_reach is not None:
        # To begin anew because of a store that is away for a while would throw away what it keeps.
        message = f"{out_of_reach}; the run waits for another try"
        raise JobError("internal", message, is_passing=True, pause_seconds=_pause(host.engine, run))
    if run.resume_checkpoint_id:
        raise JobError(
            "config_error",
            'no checkpoint of the parent run is whole any more: resume it with {"from": "start"} to train anew',
        )
    return None


def _pause(engine: Engine, run: Any) -> float | None:
    """Seconds that a run waits for what is away, longer each time; None: it has waited for hours, and tries count now.

    Counted are the attempts since the last one that began to train.
    """
    began = select(func.max(Attempt.attempt)).where(Attempt.run_id == run.id, Attempt.start_step.is_not(None))
    with engine.connect() as connection:
        waits = run.attempt - (connection.scalar(began) or 0)
    return min(_AWAY_SECONDS * waits, _LONGEST_AWAY_SECONDS) if waits <= _MOST_WAITS else None


def _candidates(engine: Engine, run: Any) -> Iterator[Any]:
    """This run's checkpoints, then the one it was created to resume and those before it, up its whole ancestry.

    Each look is over before its rows are verified: reading gigabytes must not keep a transaction open.
    """
    table = Checkpoint.__table__
    yield from _rows(engine, retention.good(run.id).with_only_columns(*table.c))  # type: ignore[attr-defined]
    resumes = run.resume_checkpoint_id
    while resumes:
        chosen = next(iter(_rows(engine, select(table).where(table.c.id == resumes))), None)
        if chosen is None:
            return
        if chosen.deleted_at is None and chosen.bad_reason is None:
            yield chosen
        earlier = retention.good(chosen.run_id, below_step=chosen.step).with_only_columns(*table.c)  # type: ignore[attr-defined]
        yield from _rows(engine, earlier)
        parent = _rows(engine, select(Run.resume_checkpoint_id).where(Run.id == chosen.run_id))
        resumes = parent[0].resume_checkpoint_id if parent else None


def _rows(engine: Engine, statement: Executable) -> Sequence[Any]:
    with engine.connect() as connection:
        return connection.execute(statement).all()
