"""Events and checkpoints of fine-tuning jobs, of all runs of a job together, newest first."""

import json
import re
from typing import Any, Literal, NamedTuple

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.openai.jobs import CheckpointMetrics, JobCheckpoint, JobEvent
from app.api.errors import invalid, to_printable
from app.openai.ids import to_native_id, to_openai_id
from app.openai.jobs.reading import unix_time
from app.runs.reading.metrics.rollups import series_values, step_of
from app.tables.checkpoints import Checkpoint
from app.tables.events import FREQUENT_TYPES
from app.tables.runs import Run

_EVENT_ID = re.compile(r"ftevent-([0-9a-z]{26})-([0-9]{1,18})")
_MOST_MESSAGE = 2000
# Two queries, each with an index of its own. A run enters and leaves `checkpointing` at each save, which is no news.
_NEWEST = text(
    f"""
    SELECT seq, type, ts, data::text FROM (
        (SELECT seq, type, ts, data FROM run_events
         WHERE run_id = :run_id AND seq < :before AND type NOT IN {FREQUENT_TYPES}
            AND type IN ('status', 'pending', 'checkpoint', 'skipped_rows', 'repair', 'error')
            AND NOT coalesce(type = 'status' AND 'checkpointing' IN (data ->> 'from', data ->> 'to'), false)
         ORDER BY seq DESC LIMIT :limit)
        UNION ALL
        (SELECT seq, type, ts, data FROM run_events
         WHERE run_id = :run_id AND seq < :before AND type IN ('metric', 'eval')
         ORDER BY seq DESC LIMIT :limit)
    ) AS newest
    ORDER BY seq DESC LIMIT :limit
    """
)
_STATUSES = {
    "pending": "The job is queued.",
    "initializing": "A worker prepares the training.",
    "running": "The training has started.",
    "completed": "The job has succeeded.",
    "failed": "The job has failed.",
    "cancelled": "The training was stopped.",
}
_MEASURES = {
    "loss": "train_loss", "learning_rate": "learning_rate", "extra.token_accuracy": "train_mean_token_accuracy",
    "eval.eval_loss": "valid_loss", "eval.eval_token_accuracy": "valid_mean_token_accuracy",
}  # fmt: skip
"""Names of metrics at OpenAI's API, by ours."""
_MOST_SEQ = 2**62


async def runs_of_job(session: AsyncSession, job: Any) -> list[str]:
    """Return the ids of the runs of a job, newest first."""
    members = select(Run.id).where(Run.job_run_id == job.id).order_by(Run.id.desc())
    return [*(await session.scalars(members)).all(), job.id]


async def list_events(session: AsyncSession, job: Any, limit: int, after: str | None) -> tuple[list[JobEvent], bool]:
    """Return one page of the events of a job, newest first, and True if there are more."""
    run_ids, before = await runs_of_job(session, job), _MOST_SEQ
    if after is not None:
        match = _EVENT_ID.fullmatch(after)
        run_id = f"run_{match[1]}" if match else ""
        if match is None or run_id not in run_ids:
            message = "must be the ID of an event of the job"
            raise invalid([FieldError(field="after", code="not_an_id", message=message)])
        run_ids, before = run_ids[run_ids.index(run_id) :], int(match[2])
    events: list[JobEvent] = []
    for run_id in run_ids:
        parameters = {"run_id": run_id, "before": before, "limit": limit + 1 - len(events)}
        rows = (await session.execute(_NEWEST, parameters)).all()
        events += [_job_event(job, run_id, row) for row in rows]
        before = _MOST_SEQ
        if len(events) > limit:
            break
    return events[:limit], len(events) > limit


async def list_checkpoints(
    session: AsyncSession, job: Any, limit: int, after: str | None
) -> tuple[list[JobCheckpoint], bool]:
    """Return one page of the checkpoints of a job whose files exist, newest first, and True if there are more."""
    run_ids = await runs_of_job(session, job)
    columns = Checkpoint.__table__.c["id", "created_at", "step", "metrics"]
    query = select(*columns).where(Checkpoint.run_id.in_(run_ids), Checkpoint.deleted_at.is_(None))
    if after is not None:
        last = to_native_id(after, "ckpt")
        if last is None:
            raise invalid([FieldError(field="after", code="not_an_id", message="must be the ID of a checkpoint")])
        query = query.where(Checkpoint.id < last)
    rows = (await session.execute(query.order_by(Checkpoint.id.desc()).limit(limit + 1))).all()
    return [_job_checkpoint(job, row) for row in rows[:limit]], len(rows) > limit


class _Content(NamedTuple):
    """Content of an event at OpenAI's API."""

    message: str
    level: Literal["info", "warn", "error"] = "info"
    type: Literal["message", "metrics"] = "message"
    data: dict[str, Any] = {}


def _job_event(job: Any, run_id: str, row: Any) -> JobEvent:
    content = _content_of(row.type, json.loads(row.data), job.total_steps)
    return JobEvent(
        id=f"ftevent-{run_id.removeprefix('run_')}-{row.seq}",
        created_at=unix_time(row.ts),
        level=content.level,
        message=to_printable(content.message, _MOST_MESSAGE),
        type=content.type,
        data=content.data,
    )


def _content_of(kind: str, data: dict[str, Any], total_steps: int | None) -> _Content:
    """Return the content of an event of a run; a trainer has reported some of it, in any form."""
    if kind in ("metric", "eval"):
        return _metrics(kind, data, total_steps)
    if kind == "checkpoint":
        saved = {"step": data.get("step"), "checkpoint": to_openai_id(data["checkpoint_id"])}
        return _Content(f"A checkpoint of step {data.get('step')} was saved.", data=saved)
    if kind == "pending":
        return _Content(str(data.get("message")), "info" if data.get("code") == "queued" else "warn")
    if kind in ("skipped_rows", "repair"):
        return _Content(str(data.get("reason")), "warn")
    if kind == "error":
        return _Content(str(data.get("message")), "error", data={"code": str(data.get("code"))})
    status = data["to"]
    if status == "pending" and data.get("from") is not None:
        return _Content(f"The job has returned to the queue: {data.get('reason')}.", "warn")
    return _Content(_STATUSES[status], "error" if status == "failed" else "info")


def _metrics(kind: str, data: dict[str, Any], total_steps: int | None) -> _Content:
    values = {_MEASURES[name]: value for name, value in series_values(kind, data) if name in _MEASURES}
    step, loss = step_of(data), values.get("valid_loss" if kind == "eval" else "train_loss")
    place = f"Step {step}" if total_steps is None else f"Step {step} of {total_steps}"
    measured = "no loss" if loss is None else f"{'validation' if kind == 'eval' else 'training'} loss {loss:.4g}"
    fields = {"step": step, "total_steps": total_steps, **values}
    return _Content(f"{'Metrics' if step is None else place}: {measured}", "info", "metrics", fields)


def _job_checkpoint(job: Any, checkpoint: Any) -> JobCheckpoint:
    loss, eval_loss = (checkpoint.metrics.get(name) for name in ("loss", "eval_loss"))
    return JobCheckpoint(
        id=to_openai_id(checkpoint.id),
        created_at=unix_time(checkpoint.created_at),
        fine_tuned_model_checkpoint=checkpoint.id,
        fine_tuning_job_id=to_openai_id(job.id),
        step_number=checkpoint.step,
        metrics=CheckpointMetrics(
            step=checkpoint.step, train_loss=loss, valid_loss=eval_loss, full_valid_loss=eval_loss
        ),
    )
