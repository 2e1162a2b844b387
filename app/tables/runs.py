"""Tables of runs, their attempts, timings and roll-ups."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Computed,
    ForeignKey,
    Index,
    Text,
    UniqueConstraint,
    and_,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from anneal.contracts.run_status import LIVE, STATUSES, TERMINAL, EndReason
from anneal.contracts.run_task import RunTask
from anneal.contracts.stop import StopMode
from app.tables.base import Base, Owned, sql_list


class StoredEstimate(Base):
    """Estimate of a run; one per run, never updated, for comparison with measurements."""

    __tablename__ = "run_estimates"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    estimate: Mapped[dict[str, Any]]


_EVALUATED = "final_score IS NOT NULL"
_NOT_EVALUATED = "final_score IS NULL AND final_loss IS NOT NULL"


class Run(Owned, Base):
    """A run. Only `app.runs.state.transitions` writes `status`."""

    __tablename__ = "runs"
    __table_args__ = (
        CheckConstraint(f"status IN {sql_list(STATUSES)}", name="status_known"),
        CheckConstraint(f"task IN {sql_list(list(RunTask))}", name="task_known"),
        CheckConstraint("task = 'serve' OR dataset_id IS NOT NULL", name="dataset_known"),
        CheckConstraint(f"(status IN {sql_list(TERMINAL)}) = (finished_at IS NOT NULL)", name="finished_iff_terminal"),
        CheckConstraint(f"(status IN {sql_list(LIVE)}) = (lease_owner IS NOT NULL)", name="leased_iff_live"),
        CheckConstraint("(lease_owner IS NULL) = (lease_expires_at IS NULL)", name="lease_whole"),
        CheckConstraint("(status = 'failed') = (error_code IS NOT NULL)", name="error_iff_failed"),
        CheckConstraint("end_reason IS NULL OR status = 'completed'", name="end_reason_of_completed"),
        CheckConstraint("status <> 'pending' OR stop_requested_at IS NULL", name="stopped_never_waits"),
        CheckConstraint("status <> 'cancelled' OR stop_requested_at IS NOT NULL", name="cancelled_by_stop"),
        CheckConstraint("lease_epoch >= attempt AND attempt >= 0", name="lease_epoch_covers_attempts"),
        CheckConstraint(f"status NOT IN {sql_list(LIVE)} OR attempt > 0", name="live_has_attempt"),
        CheckConstraint("event_seq >= 0 AND attempt_event_count >= 0 AND first_seq >= 1", name="counters_positive"),
        CheckConstraint("priority BETWEEN -1001 AND 1000", name="priority_bounded"),
        CheckConstraint("max_restarts BETWEEN 0 AND 100", name="max_restarts_bounded"),
        CheckConstraint(f"preempted_for IS NULL OR status IN {sql_list(LIVE)}", name="preempted_is_live"),
        CheckConstraint("devices_needed BETWEEN 1 AND 1024", name="devices_needed_bounded"),
        CheckConstraint("hosts_needed > 0 AND devices_needed % hosts_needed = 0", name="hosts_divide_devices"),
        UniqueConstraint("created_by", "idempotency_key"),
        Index(
            "ix_runs_pending",
            "backend",
            text("priority DESC"),
            "id",
            postgresql_where=text("status = 'pending'"),
        ),
        # A worker of several backends claims in this order.
        Index("ix_runs_queue", text("priority DESC"), "id", postgresql_where=text("status = 'pending'")),
        # A claim takes the best run of each owner.
        Index(
            "ix_runs_owner",
            text("coalesce(created_by, '')"),
            text("priority DESC"),
            "id",
            postgresql_where=text("status = 'pending'"),
        ),
        Index("ix_runs_wide", "id", postgresql_where=text("status = 'pending' AND devices_needed > 1")),
        Index("ix_runs_live", "id", postgresql_where=text(f"status IN {sql_list(LIVE)}")),
        Index("ix_runs_experiment_id_id", "experiment_id", "id"),
        Index("ix_runs_parent_run_id", "parent_run_id"),
        Index("ix_runs_base_run_id", "base_run_id"),
        Index("ix_runs_dataset_id", "dataset_id"),
        Index("ix_runs_eval_dataset_id", "eval_dataset_id"),
        Index("ix_runs_resume_checkpoint_id", "resume_checkpoint_id"),
        Index("ix_runs_job_run_id_id", "job_run_id", "id", postgresql_where=text("job_run_id IS NOT NULL")),
        Index(
            "ix_runs_job_metadata",
            "job_metadata",
            postgresql_using="gin",
            postgresql_ops={"job_metadata": "jsonb_path_ops"},
            postgresql_where=text("job_metadata IS NOT NULL"),
        ),
        # For lists. None has a column that changes while a run trains; `final_loss` is set only when it has ended.
        Index("ix_runs_status_id", "status", "id"),
        Index("ix_runs_experiment_id_status_id", "experiment_id", "status", "id"),
        Index("ix_runs_base_model_id", "base_model", "id"),
        Index("ix_runs_name_id", "name", "id"),
        Index("ix_runs_tags", "tags", postgresql_using="gin", postgresql_ops={"tags": "jsonb_path_ops"}),
        Index("ix_runs_final_score", "method", "final_score", "id", postgresql_where=text(_EVALUATED)),
        Index(
            "ix_runs_experiment_id_final_score",
            "experiment_id",
            "method",
            "final_score",
            "id",
            postgresql_where=text(_EVALUATED),
        ),
        Index("ix_runs_final_loss", "method", "final_loss", "id", postgresql_where=text(_NOT_EVALUATED)),
        Index(
            "ix_runs_experiment_id_final_loss",
            "experiment_id",
            "method",
            "final_loss",
            "id",
            postgresql_where=text(_NOT_EVALUATED),
        ),
        Index("ix_runs_unmeasured", "id", postgresql_where=text("final_loss IS NULL AND final_score IS NULL")),
        Index(
            "ix_runs_begun",
            "id",
            postgresql_where=text(f"attempt > 0 AND status NOT IN {sql_list(TERMINAL)}"),
        ),
        # Renewals and appends change no indexed column; free space on the page keeps them heap-only updates.
        {"postgresql_with": {"fillfactor": "70"}},
    )
    # After an update, computed columns are returned with it; otherwise reading them would need another query.
    __mapper_args__ = {"eager_defaults": True}

    id: Mapped[str] = mapped_column(primary_key=True)
    experiment_id: Mapped[str] = mapped_column(ForeignKey("experiments.id"))
    name: Mapped[str]
    tags: Mapped[list[str]] = mapped_column(server_default=text("'[]'"))
    task: Mapped[RunTask] = mapped_column(Text, server_default="train")
    backend: Mapped[str]
    dataset_id: Mapped[str | None] = mapped_column(ForeignKey("datasets.id"))
    """None only for the task `serve`."""
    eval_dataset_id: Mapped[str | None] = mapped_column(ForeignKey("datasets.id"))
    config: Mapped[dict[str, Any]]
    """All fields of the `TrainingConfig`, including defaults as of the creation of the run."""
    method: Mapped[str] = mapped_column(Text, Computed("config ->> 'method'", persisted=True))
    """From `config`, which lists need not read for it: it is large, and stored outside of the row."""
    base_model: Mapped[str] = mapped_column(Text, Computed("config ->> 'base_model'", persisted=True))
    user_set_fields: Mapped[list[str]]
    """Names of the fields that the user set; only defaults may be replaced."""
    warnings: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    """Warnings of its validation, each with the fields of `FieldError`."""
    effective_config: Mapped[dict[str, Any] | None]
    """Configuration that the trainer used, as it reported at its start."""
    devices_needed: Mapped[int] = mapped_column(server_default=text("1"))
    hosts_needed: Mapped[int] = mapped_column(server_default=text("1"))
    """Workers that train it together, each on the same number of `devices_needed`."""
    requirements: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """Requirements on a worker, from `resources`, the configuration and the estimate: `kind`, `memory_mb`, `labels`,
    `gguf`, `estimated_mb` (least MiB by kind of device) and `prefers_gpu`."""
    resources: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """Resources that the user asked for."""
    pending_reason: Mapped[dict[str, Any] | None]
    """Reason why no worker can take the pending run (`code` and `message`), as last reported by an event."""
    idempotency_key: Mapped[str | None]
    request_digest: Mapped[str | None]
    """SHA-256 of the request that came with the idempotency key."""
    parent_run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    """The run that this one resumes, or whose checkpoint it evaluates."""
    resume_checkpoint_id: Mapped[str | None]
    """Checkpoint that it resumes or evaluates."""
    base_run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    """The run whose output is this one's base model, or is evaluated."""
    job_run_id: Mapped[str | None]
    """First run of the fine-tuning job that this run continues; null unless that job was resumed with it."""
    job_metadata: Mapped[dict[str, Any] | None]
    """`metadata` of the fine-tuning job whose first run this is."""
    job_grader: Mapped[dict[str, Any] | None]
    """`grader` of the fine-tuning job whose first run this is, if its type is `reinforcement`."""

    pinned: Mapped[bool] = mapped_column(server_default=text("false"))
    """Excluded from retention at any age."""

    status: Mapped[str] = mapped_column(server_default="pending")
    priority: Mapped[int] = mapped_column(server_default=text("0"))
    max_restarts: Mapped[int] = mapped_column(server_default=text("3"))
    stop_requested_at: Mapped[datetime | None]
    stop_mode: Mapped[StopMode | None] = mapped_column(Text)
    """Stop mode: checkpoint, best or discard; or epoch_end, with `stop_requested_at` null until the epoch ends."""
    stop_grace_seconds: Mapped[float | None]
    """Seconds that the trainer has to stop; null: the grace period of the worker."""
    preempted_for: Mapped[str | None]
    """The pending run for which this live one is to save and return to the queue."""
    notified_at: Mapped[datetime | None]
    not_before: Mapped[datetime] = mapped_column(server_default=func.now())
    queued_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """Time at which `not_before` was set; one that is still to come shows that the clock was set back since."""

    lease_epoch: Mapped[int] = mapped_column(server_default=text("0"))
    """Fencing token (lease epoch): raised at every claim and every loss; a writer with an older one writes nothing."""
    attempt: Mapped[int] = mapped_column(server_default=text("0"))
    lost_count: Mapped[int] = mapped_column(server_default=text("0"))
    """Losses since the last new checkpoint."""
    lease_owner: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    worker_id: Mapped[str | None]
    """Worker that has the run, or had it last."""

    event_seq: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """Newest `seq` of the event log."""
    first_seq: Mapped[int] = mapped_column(BigInteger, server_default=text("1"))
    """Oldest `seq` that retention has kept."""
    attempt_event_count: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """Number of stored events of the current attempt."""

    current_step: Mapped[int] = mapped_column(server_default=text("0"))
    total_steps: Mapped[int | None]
    current_epoch: Mapped[float] = mapped_column(server_default=text("0"))
    best_loss: Mapped[float | None]
    best_score: Mapped[float | None]
    """Best evaluation metric of the method as a score of which less is better (`Method.to_score`)."""
    final_loss: Mapped[float | None]
    """`best_loss` of a run that has ended; a trigger sets it, so that it is set by writers of every version."""
    final_score: Mapped[float | None]
    """`best_score` of a run that has ended, set by the same trigger."""
    checkpoint_step: Mapped[int | None]
    """Step of the newest checkpoint."""
    end_reason: Mapped[EndReason | None] = mapped_column(Text)
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]
    output_attempt: Mapped[int | None]
    """Attempt whose `output/` contains the fine-tuned model."""
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


IS_COMPARABLE = and_(Run.task == RunTask.train, Run.config[("extra", "probe")].astext.is_distinct_from("true"))
"""Condition that the results of a run are those of a training, and not of a probe."""


class RunRewardModel(Base):
    """A run, and another run whose output it uses as a reward model."""

    __tablename__ = "run_reward_models"
    __table_args__ = (Index("ix_run_reward_models_reward_run_id", "reward_run_id"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    reward_run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)


class RunEvalDataset(Base):
    """A run, and a dataset that it evaluates on besides `eval_dataset_id`."""

    __tablename__ = "run_eval_datasets"
    __table_args__ = (Index("ix_run_eval_datasets_dataset_id", "dataset_id"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    """Name in the metrics."""
    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id"))


EXTRA_EVAL_DATASETS = (
    "(SELECT coalesce(jsonb_object_agg(name, dataset_id), '{}') FROM run_eval_datasets WHERE run_id = runs.id)"
)
"""SQL expression for the extra evaluation datasets of a row of `runs`: a JSON object of ids by name."""


class Attempt(Base):
    """One attempt of a run on one worker."""

    __tablename__ = "run_attempts"
    __table_args__ = (
        CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name="outcome_iff_ended"),
        Index("ix_run_attempts_uncounted", "run_id", postgresql_where=text("NOT is_counted")),
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    lease_epoch: Mapped[int]
    worker_id: Mapped[str]
    device: Mapped[str | None]
    """Model of its devices, `cpu` for CPUs."""
    start_step: Mapped[int | None]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
    outcome: Mapped[str | None]
    """Status or requeue reason that ended it: completed, failed, cancelled, lost, handed_back, retried, repaired."""
    report: Mapped[dict[str, Any] | None]
    """Failure report, unless it ended well; `worker/attempts/failure_report.py` defines the fields."""
    output_sha256: Mapped[str | None]
    """SHA-256 of the manifest of its output in an object store, once all files are there."""
    records_sha256: Mapped[str | None]
    """SHA-256 of the manifest of its records in an object store, once all files are there."""
    is_counted: Mapped[bool] = mapped_column(server_default=text("false"))
    """Its usage is in `daily_usage`."""


class AttemptTimings(Base):
    """Speed of an attempt and durations of its parts: the basis of predictions for it and for similar runs."""

    __tablename__ = "run_timings"
    __table_args__ = (
        Index("ix_run_timings_similarity_key_run_id", "similarity_key", text("run_id DESC")),
        # Updated while the run trains: with free space on the page, no index is updated.
        {"postgresql_with": {"fillfactor": "50"}},
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    similarity_key: Mapped[str]
    """Backend, method and base model: runs that share all three are used to predict each other."""
    device: Mapped[str | None]
    """Name of the device, as reported by the worker."""
    measured_at: Mapped[datetime]
    """Time at which `timings.step` was reached, by the clock of the database."""
    timings: Mapped[dict[str, Any]]
    """Fields of `app.runs.queue.durations.Timings`."""


class MetricRollup(Base):
    """Aggregate of consecutive points of a run, as described in `app.runs.reading.metrics.rollups`."""

    __tablename__ = "metric_rollups"
    # The last row of each level is rewritten while it fills: with free space on its page it stays there.
    __table_args__ = (
        Index("ix_metric_rollups_whole", "run_id", postgresql_where=text("level = 0")),
        {"postgresql_with": {"fillfactor": "80"}},
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    segment: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    level: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    first_step: Mapped[int] = mapped_column(BigInteger)
    last_step: Mapped[int] = mapped_column(BigInteger)
    first_seq: Mapped[int] = mapped_column(BigInteger)
    last_seq: Mapped[int] = mapped_column(BigInteger)
    points: Mapped[int] = mapped_column(BigInteger)
    # Not JSONB, which would convert each number to numeric at every rewrite, and back to text for every curve.
    series: Mapped[dict[str, Any]] = mapped_column(JSON)


class RunDeletion(Base):
    """A run whose row is deleted, and whose events and files are still to be deleted."""

    __tablename__ = "run_deletions"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
