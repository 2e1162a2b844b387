"""Removes unused checkpoint data from a worker's storage: leftovers of killed processes, and retired checkpoints."""

import logging
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Connection, select

from app.infra.async_tasks import skipping_errors
from app.infra.files.tree import remove_tree
from app.runs.state.checkpoints import retention
from app.tables.runs import Run
from app.tables.workers import Worker
from worker.checkpoint_store.restore import StoreContext
from worker.claimed_run import ClaimedRun

log = logging.getLogger(__name__)

_LEFTOVERS = (".checkpoint-*", ".deleted-*", ".output.tmp", "answers", "base_model", "base_model.*")
_FETCHED = ".fetch-*.wrk_*.run_*"


def before_attempt(context: StoreContext, run: ClaimedRun) -> None:
    """Remove what a kill left half written or half removed; no trainer of an earlier attempt is alive.

    A trainer of a later attempt may be: this worker may have been suspended since its claim and have lost the run.
    """
    for attempt in range(1, run.attempt):
        after_attempt(context, run.id, attempt)
    with context.engine.connect() as connection:
        retired = connection.execute(retention.select_retired(run.id)).all()
        half_fetched = _half_fetched(context, connection, run)
    remove_folders(context, run.id, [(attempt, name) for attempt, name in retired])
    for folder in half_fetched:
        remove_tree(folder, ignore_errors=True)


def after_attempt(context: StoreContext, run_id: str, attempt: int) -> None:
    """Remove what an ended trainer left half written: a cancelled run has no later attempt that would do it."""
    for pattern in _LEFTOVERS:
        for leftover in context.storage.attempt_dir(run_id, attempt).glob(pattern):
            remove_tree(leftover, ignore_errors=True)


def _half_fetched(context: StoreContext, connection: Connection, run: ClaimedRun) -> list[Path]:
    """Return what dead workers left half fetched, for any run, in the folders of this run and its ancestors."""
    folders: list[Path] = []
    run_id: str | None = run.id
    while run_id:
        folders += context.storage.run_dir(run_id).glob(_FETCHED)
        run_id = connection.scalar(select(Run.parent_run_id).where(Run.id == run_id))
    if not folders:
        return []
    live = set(connection.scalars(select(Worker.id).where(Worker.state != "offline")))
    return [folder for folder in folders if folder.name.split(".")[2] not in {*live, context.id}]


def remove_folders(context: StoreContext, run_id: str, retired: list[tuple[int, str]]) -> None:
    """Remove the folders of checkpoints whose rows are marked as deleted."""
    for attempt, name in retired:
        with skipping_errors(log, "%s: %s cannot be removed", run_id, name), suppress(FileNotFoundError):
            folder = context.storage.named_checkpoint(run_id, attempt, name)
            # Renamed first: a kill during the removal must not leave half a checkpoint under its name.
            going = folder.with_name(f".deleted-{name}")
            folder.rename(going)
            remove_tree(going)
