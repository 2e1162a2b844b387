"""Result files of fine-tuning jobs: the metrics of all steps as CSV, computed from the curves at each request."""

import asyncio
import csv
import io
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.schemas.openai.files import FileObject
from app.api.errors import ApiError
from app.openai.ids import to_result_file_id
from app.openai.jobs.events import runs_of_job
from app.openai.jobs.reading import find_job, job_status, unix_time
from app.runs.reading.metrics.curves import read_curves

_COLUMNS = {
    "train_loss": "loss", "train_accuracy": "extra.token_accuracy",
    "valid_loss": "eval.eval_loss", "valid_mean_token_accuracy": "eval.eval_token_accuracy",
}  # fmt: skip
"""Columns at OpenAI's API, with our series."""
_MOST_POINTS = 10_000
"""Points of each series; a longer one is thinned, with its extremes."""


async def read_result_file(
    session: AsyncSession, reading_slot: AbstractAsyncContextManager[Any], job_id: str
) -> tuple[FileObject, bytes]:
    """Return the result file of a job and its content; raise `file_not_found` if the job has not succeeded.

    `reading_slot` limits concurrent reads of curves; it is entered before the session takes a connection.
    """
    async with reading_slot:
        job = await find_job(session, job_id)
        if job_status(job) != "succeeded":
            raise ApiError(404, "file_not_found", f"Job {job_id} has no result file, because it has not succeeded.")
        rows = await _read_rows(session, job)
    content = await asyncio.to_thread(_as_csv, rows)
    file = FileObject(
        id=to_result_file_id(job_id),
        bytes=len(content),
        created_at=unix_time(job.finished_at),
        filename="step_metrics.csv",
        purpose="fine-tune-results",
    )
    return file, content


async def _read_rows(session: AsyncSession, job: Any) -> dict[int, dict[str, float | None]]:
    """Return the metrics of a job by step and series."""
    rows: dict[int, dict[str, float | None]] = {}
    for run_id in reversed(await runs_of_job(session, job)):
        curves = await read_curves(session, run_id, [*_COLUMNS.values()], 0, None, _MOST_POINTS)
        first = min((curve.steps[0] for curve in curves.values() if curve.steps), default=None)
        if first is not None:  # it has trained the later steps of the runs before it again
            rows = {step: row for step, row in rows.items() if step < first}
        for name, curve in curves.items():
            for step, value in zip(curve.steps, curve.values, strict=True):
                rows.setdefault(step, {})[name] = value
    return rows


def _as_csv(rows: Mapping[int, Mapping[str, float | None]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *_COLUMNS])
    writer.writerows([step, *(rows[step].get(name) for name in _COLUMNS.values())] for step in sorted(rows))
    return text.getvalue().encode()
