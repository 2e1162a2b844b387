"""Post-mortem of a run or of one of its attempts."""

import asyncio
import signal
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.attempt.failure_report import FailureReport
from anneal.contracts.backends import BACKEND_RULES
from anneal.contracts.run_status import TERMINAL
from anneal.contracts.schemas.postmortem import AttemptEnd, CorrectedRequest, Correction, PostMortem
from anneal.contracts.training_config.field_traits import CHANGEABLE_ON_RESUME, DEPENDS_ON_METHOD
from anneal.contracts.training_config.raw_config import without_defaults
from app.api.dependencies import release_connection
from app.api.errors import conflict
from app.runs.creating.validation.config import config_problems
from app.runs.reading.metrics.points import read_recent
from app.runs.reading.postmortem.causes import Cause, RunHistory, probable_cause
from app.runs.state import service
from app.runs.state.checkpoints.service import furthest_good
from app.tables.runs import Attempt, Run

_LOSSES = 1000
"""Number of newest points used to detect a rising loss."""
_UNSUCCESSFUL = ("failed", "lost", "retried", "repaired")


async def examine_run(session: AsyncSession, run_id: str) -> PostMortem:
    """Return the post-mortem of a failed run, or of its last unsuccessful attempt.

    Raises 409 `nothing_went_wrong` if there is neither.
    """
    run = await service.get_run(session, run_id)
    rows = await session.scalars(select(Attempt).where(Attempt.run_id == run.id).order_by(Attempt.attempt))
    attempts = rows.all()
    last = next((one for one in reversed(attempts) if one.outcome in _UNSUCCESSFUL), None)
    if last is None and run.status != "failed":
        raise conflict(
            "nothing_went_wrong",
            f"Run {run.id} is {run.status} and all its attempts succeeded, so there is no post-mortem.",
        )
    report = _report_of(last) if last else None
    trained_config = (run.config | run.effective_config) if run.effective_config else run.config
    outcome = last.outcome if last else None
    cause = probable_cause(
        run.error_code, run.error_message, report, trained_config, outcome, await _run_history(session, run)
    )
    seen = report or FailureReport()
    return PostMortem(
        run_id=run.id,
        status=run.status,
        code=run.error_code,
        message=run.error_message,
        attempt=last.attempt if last else None,
        phase=seen.phase,
        step=seen.step,
        exit_code=seen.exit_code,
        exit_signal=_signal_name(seen),
        killed_by_kernel=seen.killed_by_kernel,
        probable_cause=cause.sentence,
        advice=cause.advice,
        peaks=seen.peaks,
        memory=seen.memory,
        last_lines=seen.last_lines,
        attempts=[_attempt_end(one) for one in attempts],
        correction=await _suggest_correction(session, run, cause) if cause.changes else None,
    )


def _attempt_end(attempt: Attempt) -> AttemptEnd:
    seen = _report_of(attempt) or FailureReport()
    return AttemptEnd(
        attempt=attempt.attempt,
        worker_id=attempt.worker_id,
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        outcome=attempt.outcome,
        phase=seen.phase,
        step=seen.step,
        exit_code=seen.exit_code,
        exit_signal=_signal_name(seen),
        repair=seen.repair.model_dump() if seen.repair else None,
    )


def _report_of(attempt: Attempt) -> FailureReport | None:
    return FailureReport.model_validate(attempt.report) if attempt.report else None


def _signal_name(report: FailureReport) -> str | None:
    number = report.exit_signal
    if number is None:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def _run_history(session: AsyncSession, run: Run) -> RunHistory:
    points = await read_recent(session, run.id, _LOSSES)
    losses = [point.loss for point in points if point.loss is not None]
    return RunHistory(losses, has_checkpoint=await furthest_good(session, run.id) is not None)


async def _suggest_correction(session: AsyncSession, run: Run, cause: Cause) -> Correction | None:
    changes = cause.changes
    replaced = DEPENDS_ON_METHOD if "method" in changes else ()
    user_config = without_defaults(run.config, set(run.user_set_fields))
    config = {name: value for name, value in user_config.items() if name not in replaced} | changes
    await release_connection(session)
    problems, _ = await asyncio.to_thread(
        config_problems, BACKEND_RULES.get(run.backend), config, run.eval_dataset_id is not None
    )
    if problems or run.dataset_id is None:
        return None
    can_resume = not cause.is_for_new_run and run.status in TERMINAL and changes.keys() <= CHANGEABLE_ON_RESUME
    if can_resume and await furthest_good(session, run.id) is not None:
        request = CorrectedRequest(path=f"/v1/runs/{run.id}/resume", body={"config": changes})
    else:
        fields: dict[str, Any] = {
            "experiment_id": run.experiment_id, "name": run.name, "tags": run.tags, "backend": run.backend,
            "dataset_id": run.dataset_id, "eval_dataset_id": run.eval_dataset_id, "priority": run.priority,
            "max_restarts": run.max_restarts, "resources": run.resources,
        }  # fmt: skip
        if extra := await service.extra_eval_datasets(session, run):
            fields["extra_eval_datasets"] = extra
        request = CorrectedRequest(path="/v1/runs", body={**fields, "config": config})
    return Correction(changes=changes, config=config, request=request)
