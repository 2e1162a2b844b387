"""Attempt of a run that writes as a worker does: events and rollups in one transaction per call."""

from collections.abc import Sequence

from sqlalchemy import Engine

from app.runs.events import log as event_log
from app.runs.events.log import NewEvent, Progress
from app.runs.reading.metrics.rollups import Rollups
from app.runs.state import machine
from tests.rows import add_run, add_worker, claim


class Attempt:
    """Create and claim a new run."""

    def __init__(self, engine: Engine) -> None:
        self.run_id: str = add_run(engine).id
        run = claim(engine, add_worker(engine), lease=3600)
        assert run.id == self.run_id
        self.stored = 0
        self._engine = engine
        self._epoch = run.lease_epoch
        self._rollups = Rollups(run.id, run.attempt)

    def store(self, events: Sequence[NewEvent], progress: Progress | None = None) -> None:
        """Store a batch as `worker.ingest.event_writer` does."""
        first = self.stored + 1
        self.send(first, events, progress)
        self._rollups.note_commit()
        self.stored += len(events)

    def send(self, first: int, events: Sequence[NewEvent], progress: Progress | None = None) -> None:
        """Store events `first`, `first` + 1, … of the attempt; safe to repeat after an unknown outcome."""
        with self._engine.begin() as connection:
            stored = event_log.append_events(connection, self.run_id, self._epoch, first, events, progress)
            self._rollups.store_changes(connection, first, events, stored)

    def complete(self) -> None:
        """Complete the run."""
        with self._engine.begin() as connection:
            connection.execute(machine.complete(self.run_id, self._epoch, None, "benchmark")).one()
