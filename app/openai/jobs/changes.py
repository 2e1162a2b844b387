"""Cancels, pauses and resumes fine-tuning jobs. A job keeps its id over all runs that resume it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.schemas.runs.requests import RunResume
from app.api.errors import ApiError, conflict
from app.api.idempotency import Idempotency, request_digest
from app.openai.jobs.reading import find_job, job_status
from app.runs.creating.creation import RunTransaction
from app.runs.dependencies import Backend
from app.tables.runs import Run
from app.webhooks.outbox import ENQUEUE_CANCELLED_JOB

Backends = Callable[[str], Backend]
"""Function that returns the backend of a name."""


async def cancel_job(transaction: RunTransaction, backends: Backends, job_id: str) -> None:
    """End a job without saving; no error if it is cancelled already, 409 if it has ended by itself."""
    job = await _lock_job(transaction.session, job_id)
    status = job_status(job)
    if status == "cancelled":
        return
    _refuse_ended(job_id, status, "cancelled")
    if status != "paused":
        await backends(job.backend).stop_run(transaction, job.run_id, "discard")
        # Another request may have resumed the job before the lock, and paused it: that run was not locked.
        status = job_status(await find_job(transaction.session, job_id))
    if status == "paused":
        # Its run has ended, so that the stop mode is all that distinguishes it from a job that can be resumed.
        paused = (Run.id == job.run_id, Run.status == "cancelled")
        await transaction.session.execute(update(Run).where(*paused).values(stop_mode="discard"))
        await transaction.session.execute(text(ENQUEUE_CANCELLED_JOB), {"run_id": job.run_id})


async def pause_job(transaction: RunTransaction, backends: Backends, job_id: str) -> None:
    """Let a job save a checkpoint and end its run; no error if it is paused already, 409 if it has ended."""
    job = await find_job(transaction.session, job_id)
    status = job_status(job)
    if status == "paused":
        return
    _refuse_ended(job_id, status, "paused")
    await backends(job.backend).stop_run(transaction, job.run_id, "checkpoint")


async def resume_job(transaction: RunTransaction, backends: Backends, job_id: str) -> None:
    """Continue a paused or failed job with a new run, from its newest checkpoint or the start.

    No error if it waits or runs; 409 while it is being paused, and if it has succeeded or was cancelled.
    """
    session = transaction.session
    job = await find_job(session, job_id)
    status = job_status(job)
    if status in ("queued", "running"):
        if job.stop_requested_at is not None:
            detail = f"Job {job_id} is being paused: resume it once its status is `paused`."
            raise conflict("job_is_being_paused", detail)
        return
    if status != "failed":
        _refuse_ended(job_id, status, "resumed")
    # A client that repeats the request gets the run that the first one has created.
    digest = request_digest("resume", job.run_id.encode())
    transaction = replace(transaction, idempotency=Idempotency(f"resume {job.run_id}", digest))
    child = await _resume_run(transaction, backends(job.backend), job)
    await _add_to_job(session, job, child, job_id)


async def _resume_run(transaction: RunTransaction, backend: Backend, job: Any) -> Run:
    try:
        return await backend.resume_run(transaction, job.run_id, RunResume())
    except ApiError as error:
        if error.code != "no_checkpoint":
            raise
        # It was paused before its first checkpoint, so from the start nothing is trained twice.
        return await backend.resume_run(transaction, job.run_id, RunResume.model_validate({"from": "start"}))


async def _add_to_job(session: AsyncSession, job: Any, child: Run, job_id: str) -> None:
    """Make a run the newest one of its job; raise 409 if another request has resumed or cancelled the job meanwhile."""
    current = await _lock_job(session, job_id)
    if current.run_id == child.id:
        return
    if current.run_id != job.run_id or job_status(current) != job_status(job):
        detail = f"Job {job_id} was resumed or cancelled by another request at this moment: retrieve it."
        raise conflict("job_has_changed", detail)
    await session.execute(update(Run).where(Run.id == child.id).values(job_run_id=job.id))


async def _lock_job(session: AsyncSession, job_id: str) -> Any:
    """Return the row of a job, which no other request resumes, cancels or deletes until the commit."""
    job = await find_job(session, job_id)
    # In the order of `service.lock_runs`. Requests that refer to the runs need not wait: a resume does so before this.
    runs = select(Run.id).where(Run.id.in_([job.id, job.run_id])).order_by(Run.id.desc())
    await session.execute(runs.with_for_update(key_share=True))
    return await find_job(session, job_id)


def _refuse_ended(job_id: str, status: str, wanted_status: str) -> None:
    """Raise 409 for a job that has ended and so cannot become what a request asks for."""
    if status in ("succeeded", "failed", "cancelled"):
        has_ended = "was cancelled" if status == "cancelled" else f"has {status}"
        raise conflict("job_has_ended", f"Job {job_id} {has_ended} and can no longer be {wanted_status}.")
