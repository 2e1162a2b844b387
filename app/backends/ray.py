"""Backend for the nodes of a Ray cluster: each run gets a worker of its own, which Ray places."""

from collections.abc import Callable
from typing import Any

from anneal.contracts.stop import StopMode
from app.backends.celery import CeleryBackend
from app.runs.creating.creation import RunTransaction
from app.tables.runs import Run


class RayBackend(CeleryBackend):
    """Backend that launches a run by inserting a pending row, for which the loop of `ray_jobs` submits a job.

    Rows, claims, leases, events and checkpoints are those of the workers that are started by hand.
    """

    def __init__(self, *arguments: Any, wake: Callable[[], None]) -> None:
        """Create the backend; `wake` begins a round of the loop that submits jobs."""
        super().__init__(*arguments)
        self._wake = wake

    def _announce_run(self, transaction: RunTransaction) -> None:
        transaction.after_commit.add_task(self._begin_round)

    async def stop_run(
        self, transaction: RunTransaction, run_id: str, mode: StopMode, grace_seconds: float | None = None
    ) -> Run:
        """Store the request; after the commit, notify the run's worker and readers, or stop the job that waits."""
        run = await super().stop_run(transaction, run_id, mode, grace_seconds)
        transaction.after_commit.add_task(self._begin_round)
        return run

    async def _begin_round(self) -> None:
        self._wake()
