"""Recorder of phases, which also move the run: it runs once training has started, and saves checkpoints."""

from typing import Any

from sqlalchemy import Connection, Executable, select

from anneal.contracts.attempt.messages import PhaseRecord
from anneal.contracts.run_task import RunTask
from app.runs.events.log import LeaseFenced, NewEvent
from app.runs.state import machine
from app.tables.runs import Run
from worker.claimed_run import ClaimedRun
from worker.ingest.attempt_state import AttemptState
from worker.ingest.record_parser import validate_record
from worker.ingest.recorders.metrics import MetricRecorder
from worker.ingest.sink import EventSink
from worker.ingest.spool import RunUpdate

_MAIN_PHASES = {RunTask.train: "training", RunTask.predict: "predicting", RunTask.serve: "serving"}
"""Phases with which a run is running, by its task."""


class PhaseRecorder:
    """Recorder of the phases of one attempt."""

    def __init__(self, run: ClaimedRun, sink: EventSink, state: AttemptState, metrics: MetricRecorder) -> None:
        self._run, self._sink, self._state, self._metrics = run, sink, state, metrics
        self._status = "initializing"

    def record_phase(self, record: dict[str, Any], ts: float) -> None:
        """Store a phase as progress, and the transition of the run that follows from it."""
        entered = validate_record(PhaseRecord, record)
        run, state, metrics = self._run, self._state, self._metrics
        phase = state.phase = entered["name"]
        metrics.timer.enter_phase(phase, metrics.start.step)
        progress = {"phase": phase, "done": None, "total": None, "message": phase}
        self._sink.enqueue_item(NewEvent.from_payload("progress", ts, progress))
        if phase == _MAIN_PHASES.get(run.task, "evaluating") and not state.training_started:
            state.training_started = True
            metrics.set_total_steps(entered.get("total_steps"))
            start, total = metrics.start, metrics.total_steps
            self._move_run(
                machine.begin(
                    run.id, run.lease_epoch, start.step, start.epoch, total, metrics.best_loss, metrics.best_score
                ),
                "running",
            )
            metrics.store_timings(is_due=metrics.timer.is_due)
        elif phase == "saving" and self._status == "running":
            self._move_run(machine.begin_save(run.id, run.lease_epoch), "checkpointing")
        elif phase != "saving" and self._status == "checkpointing":
            self._move_run(machine.end_save(run.id, run.lease_epoch), "running")

    def _move_run(self, statement: Executable, target: str) -> None:
        def apply_transition(connection: Connection) -> None:
            if connection.execute(statement).one_or_none() is None:
                now = connection.execute(
                    select(Run.lease_epoch, Run.status).where(Run.id == self._run.id)
                ).one_or_none()
                # An earlier try may have been committed although its response was lost.
                if now is None or now.lease_epoch != self._run.lease_epoch or now.status != target:
                    raise LeaseFenced(self._run.id)

        self._status = target
        self._sink.enqueue_item(RunUpdate(apply_transition))
