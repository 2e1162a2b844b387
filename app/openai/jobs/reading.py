"""Reads fine-tuning jobs: each is the first run of a lineage, with the state of the newest run that has resumed it."""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from anneal.contracts.methods import Method, TrainingMethod, method_of
from anneal.contracts.run_status import LIVE
from anneal.contracts.schemas.openai.hyperparameters import DEFAULT_COMPLETIONS
from anneal.contracts.schemas.openai.jobs import JobError, JobObject, JobStatus, UsedHyperparameters
from anneal.contracts.schemas.runs.reads import Prediction
from anneal.contracts.training_config.fields import TrainingConfig
from app.api.errors import ApiError, to_printable
from app.openai.ids import to_native_id, to_openai_id, to_result_file_id

_DEFAULTS = {
    name: TrainingConfig.model_fields[name].default
    for name in ("batch_size", "gradient_accumulation_steps", "epochs", "seed")
}
"""Values of runs that were stored without them, by an earlier version."""
# A configuration is large, and stored outside of the row: each operator on it would fetch and decompress it once more.
# A probe only measures, and is no job.
_JOBS = f"""
SELECT first.id, first.created_at, first.job_metadata, first.job_grader, run.id AS run_id, run.status, run.backend,
    run.method, run.base_model, run.dataset_id, run.eval_dataset_id, run.total_steps, run.stop_mode,
    run.stop_requested_at, run.finished_at, run.error_code, run.error_message, run.output_attempt,
    coalesce(cast(run.resources ->> 'devices' AS int), 1)
        / coalesce(cast(run.resources ->> 'sequence_parallel' AS int), 1) AS shares,
    {", ".join(f"coalesce(config.{name}, {default}) AS {name}" for name, default in _DEFAULTS.items())},
    config.lora_r, config.learning_rate, config.max_steps, cast(config.dpo ->> 'beta' AS float) AS beta,
    config.eval_steps, cast(config.rlhf ->> 'num_generations' AS int) AS completions,
    config.report_to @> '"wandb"' AS reports_to_wandb, config.wandb_project, config.wandb_name, config.wandb_entity,
    CASE WHEN run.status = 'completed' THEN (
        SELECT sum(least(cast(timings ->> 'tokens' AS float), 1e18)) FROM run_timings WHERE run_id = ANY (
            ARRAY(SELECT first.id UNION ALL SELECT member.id FROM runs AS member WHERE member.job_run_id = first.id)
        )
    ) END AS trained_tokens
FROM runs AS first
JOIN runs AS run
    ON run.id = coalesce((SELECT max(member.id) FROM runs AS member WHERE member.job_run_id = first.id), first.id)
CROSS JOIN LATERAL jsonb_to_record(run.config) AS config (
    batch_size int, gradient_accumulation_steps int, lora_r int, learning_rate float, epochs float, max_steps bigint,
    seed bigint, dpo jsonb, rlhf jsonb, eval_steps jsonb, report_to jsonb, wandb_project text, wandb_name text,
    wandb_entity text, extra jsonb
)
WHERE first.task = 'train' AND first.job_run_id IS NULL AND config.extra ->> 'probe' IS DISTINCT FROM 'true'
"""


@lru_cache(maxsize=512)
def _select_jobs(limit: int, *conditions: str) -> TextClause:
    where = "".join(f" AND {condition}" for condition in conditions)
    # A constant: for a parameter, PostgreSQL plans each execution, since its generic plan expects many rows.
    return text(f"{_JOBS}{where} ORDER BY first.id DESC LIMIT {limit}")


async def find_job(session: AsyncSession, job_id: str) -> Any:
    """Return the row of a job; raise `job_not_found` if there is none."""
    run_id = to_native_id(job_id, "run")
    row = None
    if run_id is not None:
        row = (await session.execute(_select_jobs(1, "first.id = :id"), {"id": run_id})).one_or_none()
    if row is None:
        there_is_none = f"There is no job {to_printable(job_id, 60)}; `GET /openai/v1/fine_tuning/jobs` lists the jobs."
        raise ApiError(404, "job_not_found", there_is_none)
    return row


async def list_jobs(
    connection: AsyncConnection, limit: int, after: str | None, metadata: Mapping[str, str] | None
) -> tuple[list[Any], bool]:
    """Return the rows of one page of jobs, newest first, and True if there are more.

    `after` is the id of the first run of the last job on the page before. Jobs have all of `metadata`; None: jobs
    without metadata.
    """
    conditions, parameters = [], dict[str, Any]()
    if after is not None:
        conditions.append("first.id < :after")
        parameters["after"] = after
    if metadata is None:
        conditions.append("first.job_metadata IS NULL")
    elif metadata:
        conditions.append("first.job_metadata @> cast(:metadata AS jsonb)")
        parameters["metadata"] = json.dumps(metadata)
    rows = list((await connection.execute(_select_jobs(limit + 1, *conditions), parameters)).all())
    return rows[:limit], len(rows) > limit


def job_status(row: Any) -> JobStatus:
    """Return the status of a job. A stop that saves pauses it; one that discards cancels it, from its request on."""
    if row.status == "completed":
        return "succeeded"
    if row.status == "failed":
        return "failed"
    if row.stop_mode == "discard" and row.stop_requested_at is not None:
        return "cancelled"
    if row.status == "cancelled":
        return "paused"
    return "running" if row.status in LIVE else "queued"


def job_object(row: Any, prediction: Prediction | None = None) -> JobObject:
    """Return a job as OpenAI's clients read it."""
    status, method = job_status(row), method_of({"method": row.method})
    job_id, hyperparameters = to_openai_id(row.id), _hyperparameters(row, method)
    finish = prediction.finish_at if prediction is not None else None
    has_ended = status in ("succeeded", "failed", "cancelled")
    error = JobError(code=row.error_code, message=row.error_message or "") if status == "failed" else None
    return JobObject(
        id=job_id,
        created_at=unix_time(row.created_at),
        finished_at=unix_time(row.finished_at) if has_ended and row.finished_at is not None else None,
        estimated_finish=unix_time(finish) if finish is not None else None,
        model=row.base_model,
        fine_tuned_model=row.run_id if status == "succeeded" and row.output_attempt is not None else None,
        status=status,
        hyperparameters=hyperparameters,
        method=_method(row, method, hyperparameters),
        training_file=to_openai_id(row.dataset_id),
        validation_file=to_openai_id(row.eval_dataset_id) if row.eval_dataset_id else None,
        result_files=[to_result_file_id(job_id)] if status == "succeeded" else [],
        trained_tokens=None if row.trained_tokens is None else round(row.trained_tokens),
        seed=row.seed,
        integrations=_integrations(row),
        metadata=row.job_metadata,
        error=error,
    )


def unix_time(moment: datetime) -> int:
    """Return a time in whole seconds since 1970."""
    return int(moment.timestamp())


def _hyperparameters(row: Any, method: Method) -> UsedHyperparameters:
    default_rate = method.default_fields(row.lora_r)["learning_rate"]
    rate = default_rate if row.learning_rate is None else row.learning_rate
    epochs = int(row.epochs) if row.epochs == int(row.epochs) else row.epochs
    completions = row.completions if method.generates and row.completions else 1
    return UsedHyperparameters(
        batch_size=row.batch_size * row.gradient_accumulation_steps * row.shares // completions,
        learning_rate_multiplier=float(f"{rate / default_rate:.6g}"),
        n_epochs="auto" if row.max_steps is not None else epochs,
        beta=row.beta if method.name is TrainingMethod.dpo else None,
    )


def _method(row: Any, method: Method, hyperparameters: UsedHyperparameters) -> dict[str, Any] | None:
    if row.job_grader is not None:
        own = {
            "compute_multiplier": row.completions / DEFAULT_COMPLETIONS,
            "eval_interval": row.eval_steps if isinstance(row.eval_steps, int) else "auto",
            "eval_samples": "auto",
            "reasoning_effort": "default",
        }
        options = {"grader": row.job_grader, "hyperparameters": {**hyperparameters.model_dump(), **own}}
        return {"type": "reinforcement", "reinforcement": options}
    kind = "supervised" if method.is_supervised else "dpo" if method.name is TrainingMethod.dpo else None
    return None if kind is None else {"type": kind, kind: {"hyperparameters": hyperparameters.model_dump()}}


def _integrations(row: Any) -> list[dict[str, Any]]:
    if not row.reports_to_wandb:
        return []
    names = {"project": row.wandb_project, "name": row.wandb_name, "entity": row.wandb_entity}
    return [{"type": "wandb", "wandb": {**names, "tags": []}}]
