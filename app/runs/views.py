"""Runs as they go over the wire."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.checkpoints.service import furthest_good_of_each
from app.runs.metrics import recent
from app.runs.models import Run
from app.runs.schemas import RunRead, RunSummary
from app.storage import Storage

_SAME = (
    "experiment_id", "name", "tags", "backend", "dataset_id", "eval_dataset_id", "config", "effective_config",
    "status", "priority", "max_restarts", "pinned", "parent_run_id", "resume_checkpoint_id", "base_run_id", "attempt",
    "worker_id", "current_step", "total_steps", "current_epoch", "best_loss", "error_code", "error_message",
    "stop_requested_at", "created_by", "created_at", "started_at", "finished_at",
)  # fmt: skip
_HISTORY = 100


async def one(session: AsyncSession, storage: Storage, run: Run) -> RunRead:
    """A run with its newest metrics."""
    history = await recent(session, run.id, _HISTORY) if run.attempt else []
    (fields,) = await _fields(session, storage, [run])
    return RunRead(**fields, metrics_history=history)


async def many(session: AsyncSession, storage: Storage, runs: Sequence[Run]) -> list[RunSummary]:
    """Runs of a list."""
    return [RunSummary(**fields) for fields in await _fields(session, storage, runs)]


async def _fields(session: AsyncSession, storage: Storage, runs: Sequence[Run]) -> list[dict[str, Any]]:
    # Who has never been claimed has neither checkpoints nor metrics, and a request for a run is not to wait for that.
    claimed = [run.id for run in runs if run.attempt]
    checkpoints = await furthest_good_of_each(session, claimed) if claimed else {}
    described = []
    for run in runs:
        fields = {name: getattr(run, name) for name in _SAME}
        saved = checkpoints.get(run.id)
        folder = storage.checkpoint_dir(run.id, saved.attempt, saved.step) if saved else None
        output = storage.output_dir(run.id, run.output_attempt) if run.output_attempt is not None else None
        described.append(
            {
                **fields,
                "id": run.id,
                "run_id": run.id,
                "last_seq": run.event_seq,
                "checkpoint_path": str(folder) if folder else None,
                "fine_tuned_model": str(output) if output else None,
            }
        )
    return described
