"""Runs and their attempts."""

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, CheckConstraint, ForeignKey, Index, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from app.models import Base, Owned

LIVE = ("initializing", "running", "checkpointing")
TERMINAL = ("completed", "failed", "cancelled")
STATUSES = ("pending", *LIVE, *TERMINAL)


def sql_list(values: tuple[str, ...]) -> str:
    """`('a','b')`, for constraints and partial indexes."""
    return "(" + ",".join(f"'{value}'" for value in values) + ")"


class Run(Owned, Base):
    """A training run. `status` is written by `app.runs.lifecycle` alone."""

    __tablename__ = "runs"
    __table_args__ = (
        CheckConstraint(f"status IN {sql_list(STATUSES)}", name="status_known"),
        CheckConstraint(f"(status IN {sql_list(TERMINAL)}) = (finished_at IS NOT NULL)", name="finished_iff_terminal"),
        CheckConstraint(f"(status IN {sql_list(LIVE)}) = (lease_owner IS NOT NULL)", name="leased_iff_live"),
        CheckConstraint("(lease_owner IS NULL) = (lease_expires_at IS NULL)", name="lease_whole"),
        CheckConstraint("(status = 'failed') = (error_code IS NOT NULL)", name="error_iff_failed"),
        CheckConstraint("status <> 'pending' OR stop_requested_at IS NULL", name="stopped_never_waits"),
        CheckConstraint("status <> 'cancelled' OR stop_requested_at IS NOT NULL", name="cancelled_by_stop"),
        CheckConstraint("epoch >= attempt AND attempt >= 0", name="epoch_covers_attempts"),
        CheckConstraint(f"status NOT IN {sql_list(LIVE)} OR attempt > 0", name="live_has_attempt"),
        CheckConstraint("event_seq >= 0 AND src_hwm >= 0 AND first_seq >= 1", name="counters_positive"),
        CheckConstraint("priority BETWEEN -1000 AND 1000", name="priority_bounded"),
        CheckConstraint("max_restarts BETWEEN 0 AND 100", name="max_restarts_bounded"),
        CheckConstraint("devices_needed BETWEEN 1 AND 1024", name="devices_needed_bounded"),
        UniqueConstraint("created_by", "idempotency_key"),
        Index(
            "ix_runs_pending",
            "backend",
            text("priority DESC"),
            "id",
            postgresql_where=text("status = 'pending'"),
        ),
        Index("ix_runs_live", "id", postgresql_where=text(f"status IN {sql_list(LIVE)}")),
        Index("ix_runs_experiment_id_id", "experiment_id", "id"),
        Index("ix_runs_parent_run_id", "parent_run_id"),
        Index("ix_runs_base_run_id", "base_run_id"),
        Index("ix_runs_dataset_id", "dataset_id"),
        Index("ix_runs_eval_dataset_id", "eval_dataset_id"),
        Index("ix_runs_resume_checkpoint_id", "resume_checkpoint_id"),
        # For lists. None has a column that changes while a run trains; `final_loss` stands still until it has ended.
        Index("ix_runs_status_id", "status", "id"),
        Index("ix_runs_experiment_id_status_id", "experiment_id", "status", "id"),
        Index("ix_runs_base_model_id", text("(config ->> 'base_model')"), "id"),
        Index("ix_runs_tags", "tags", postgresql_using="gin", postgresql_ops={"tags": "jsonb_path_ops"}),
        Index("ix_runs_final_loss_id", "final_loss", "id", postgresql_where=text("final_loss IS NOT NULL")),
        Index(
            "ix_runs_experiment_id_final_loss_id",
            "experiment_id",
            "final_loss",
            "id",
            postgresql_where=text("final_loss IS NOT NULL"),
        ),
        Index("ix_runs_without_final_loss", "id", postgresql_where=text("final_loss IS NULL")),
        Index(
            "ix_runs_begun",
            "id",
            postgresql_where=text(f"attempt > 0 AND status NOT IN {sql_list(TERMINAL)}"),
        ),
        # Renewals and appends touch no indexed column; room on the page keeps them heap-only updates.
        {"postgresql_with": {"fillfactor": "70"}},
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    experiment_id: Mapped[str] = mapped_column(ForeignKey("experiments.id"))
    name: Mapped[str]
    tags: Mapped[list[str]] = mapped_column(server_default=text("'[]'"))
    backend: Mapped[str]
    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id"))
    eval_dataset_id: Mapped[str | None] = mapped_column(ForeignKey("datasets.id"))
    config: Mapped[dict[str, Any]]
    """Every field of the `TrainingConfig`, defaults included, as they were when the run was created."""
    given: Mapped[list[str]]
    """Names of the fields that the user set; a default may be replaced, a wish may not."""
    effective_config: Mapped[dict[str, Any] | None]
    """What the trainer really used, told by it at its start."""
    devices_needed: Mapped[int] = mapped_column(server_default=text("1"))
    requirements: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """What a worker must offer: `{"kind": "cuda"}`, `{"memory_mb": 24000}`."""
    idempotency_key: Mapped[str | None]
    request_digest: Mapped[str | None]
    """SHA-256 of the body that came with the idempotency key."""
    parent_run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    """The run that this one resumes."""
    resume_checkpoint_id: Mapped[str | None]
    base_run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    """The run whose output is this one's base model."""

    pinned: Mapped[bool] = mapped_column(server_default=text("false"))
    """Kept by retention, whatever its age."""

    status: Mapped[str] = mapped_column(server_default="pending")
    priority: Mapped[int] = mapped_column(server_default=text("0"))
    max_restarts: Mapped[int] = mapped_column(server_default=text("3"))
    stop_requested_at: Mapped[datetime | None]
    stop_save_checkpoint: Mapped[bool] = mapped_column(server_default=text("true"))
    stop_mode: Mapped[str | None]
    """How it is to stop: checkpoint, best, discard; or epoch_end, then `stop_requested_at` is null until it ends."""
    hinted_at: Mapped[datetime | None]
    not_before: Mapped[datetime] = mapped_column(server_default=func.now())

    epoch: Mapped[int] = mapped_column(server_default=text("0"))
    """The fence: raised at every claim and every loss; a writer with an older one writes nothing."""
    attempt: Mapped[int] = mapped_column(server_default=text("0"))
    lost_count: Mapped[int] = mapped_column(server_default=text("0"))
    """Losses since the last new checkpoint."""
    lease_owner: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    worker_id: Mapped[str | None]
    """The worker that has it, or had it last."""

    event_seq: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """Newest `seq` of the event log."""
    first_seq: Mapped[int] = mapped_column(BigInteger, server_default=text("1"))
    """Oldest `seq` that retention has left."""
    src_hwm: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    """How many events of the present attempt are stored."""

    current_step: Mapped[int] = mapped_column(server_default=text("0"))
    total_steps: Mapped[int | None]
    current_epoch: Mapped[float] = mapped_column(server_default=text("0"))
    best_loss: Mapped[float | None]
    final_loss: Mapped[float | None]
    """`best_loss` of a run that has ended; a trigger sets it, so that every version's writers do."""
    checkpoint_step: Mapped[int | None]
    """Step of the newest checkpoint."""
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]
    output_attempt: Mapped[int | None]
    """Attempt whose `output/` holds the fine-tuned model."""
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


IS_NO_PROBE = Run.config[("extra", "probe")].astext.is_distinct_from("true")
"""The run does not only measure another one."""


class RunRewardModel(Base):
    """A run, and another whose output is a reward model that it learns from."""

    __tablename__ = "run_reward_models"
    __table_args__ = (Index("ix_run_reward_models_reward_run_id", "reward_run_id"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    reward_run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)


class Attempt(Base):
    """One try of a run on one worker."""

    __tablename__ = "run_attempts"
    __table_args__ = (CheckConstraint("(outcome IS NULL) = (ended_at IS NULL)", name="outcome_iff_ended"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    worker_id: Mapped[str]
    start_step: Mapped[int | None]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
    outcome: Mapped[str | None]
    """Status or requeue reason that ended it: completed, failed, cancelled, lost, handed_back, retried, repaired."""
    report: Mapped[dict[str, Any] | None]
    """How it ended as its supervisor saw it, unless that went well: `worker/last_words.py` has the fields."""


class Pace(Base):
    """How fast an attempt goes and how long its parts take: what predictions of it and of like runs rest on."""

    __tablename__ = "run_paces"
    __table_args__ = (
        Index("ix_run_paces_likeness_run_id", "likeness", text("run_id DESC")),
        # Rewritten while the run trains: `likeness` never is, and with room on the page no index is touched.
        {"postgresql_with": {"fillfactor": "50"}},
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    likeness: Mapped[str]
    """Backend, method and base model: runs that have all three in common say something about each other."""
    device: Mapped[str | None]
    """Name of the device, as the worker offered it."""
    measured_at: Mapped[datetime]
    """When `timings.step` was reached, by the clock of the database."""
    timings: Mapped[dict[str, Any]]
    """`app.runs.prediction.Timings`."""


class MetricRollup(Base):
    """A stretch of a run's points, as `app.runs.rollups` describes it."""

    __tablename__ = "metric_rollups"
    # The last row of each level is rewritten while it fills: with room on its page it stays there.
    __table_args__ = ({"postgresql_with": {"fillfactor": "80"}},)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    pass_: Mapped[int] = mapped_column("pass", primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    level: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    first_step: Mapped[int] = mapped_column(BigInteger)
    last_step: Mapped[int] = mapped_column(BigInteger)
    first_seq: Mapped[int] = mapped_column(BigInteger)
    last_seq: Mapped[int] = mapped_column(BigInteger)
    points: Mapped[int] = mapped_column(BigInteger)
    # As text: JSONB would make each number a numeric, at every rewrite, and a text of it again for every curve.
    series: Mapped[dict[str, Any]] = mapped_column(JSON)


class Removal(Base):
    """A run whose row is gone, and whose events and files have yet to go."""

    __tablename__ = "removals"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
