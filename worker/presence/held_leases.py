"""Leases that the threads of a worker hold."""

from typing import Protocol

from app.workers.status_files import WorkerStatusFile


class HeldLease(Protocol):
    """A lease as others see it: control messages of the API name its run and have it renewed at once."""

    run_id: str

    def renew_now(self) -> None:
        """Have the lease renewed now, from its own thread; returns at once."""


class HeldLeases:
    """Leases of a worker by run, which its status file names; every method may be called from any thread."""

    def __init__(self, status_file: WorkerStatusFile) -> None:
        self._status_file = status_file
        self._leases: dict[str, HeldLease] = {}

    @property
    def run_ids(self) -> list[str]:
        """Runs on which a lease is held."""
        return list(self._leases)

    def hold(self, lease: HeldLease) -> None:
        """Register a lease that control messages may concern."""
        self._leases[lease.run_id] = lease
        self.note_progress({})

    def release(self, lease: HeldLease) -> None:
        """Remove an ended lease; one on a later attempt of the same run stays."""
        if self._leases.get(lease.run_id) is lease:
            del self._leases[lease.run_id]
        self.note_progress({})

    def renew_now(self, run_id: str) -> None:
        """Have the lease on a run renewed now, if one is held."""
        if lease := self._leases.get(run_id):
            lease.renew_now()

    def note_progress(self, steps: dict[str, list[int | None]]) -> None:
        """Write the runs into the status file, with the step and the number of steps of those that are known."""
        self._status_file.update(runs={run_id: steps.get(run_id, [None, None]) for run_id in self.run_ids})
