"""Failure report of an attempt: exit status, memory timeline and last log lines."""

from sqlalchemy import Connection, exists, select, update

from anneal.contracts.attempt.failure_report import FailureReport
from anneal.contracts.attempt.repair import Repair
from app.runs.events.log import NewEvent
from app.tables.runs import Attempt, Run
from worker.attempts import auto_repair
from worker.attempts.memory_watch import MemoryWatch
from worker.claimed_run import ClaimedRun
from worker.ingest.attempt_state import AttemptState
from worker.ingest.spool import RunUpdate
from worker.process.training_process import Exit

_LONGEST_LINE = 2000


def build_failure_report(
    state: AttemptState,
    memory_watch: MemoryWatch,
    end: Exit,
    repair: Repair | None,
    rank: int | None = None,
) -> FailureReport:
    """Build the failure report of an attempt; `rank` is that of `end`, None if there was one process."""
    return FailureReport(
        exit_code=end.code,
        exit_signal=end.signal,
        rank=rank,
        killed_by_kernel=end.out_of_memory,
        killed_for=end.killed_for,
        phase=state.phase,
        step=state.step,
        error=state.result.get("error") if state.result else None,
        peaks=memory_watch.peaks,
        memory=memory_watch.timeline,
        last_lines=[line[:_LONGEST_LINE] for line in state.tail],
        repair=repair,
    )


def store_failure_report(run: ClaimedRun, report: FailureReport, at: float) -> RunUpdate:
    """Return an update that stores the report with the attempt and, if there is a repair, its event."""
    repair = report.repair

    def store_report(connection: Connection) -> None:
        this = (Attempt.run_id == run.id, Attempt.attempt == run.attempt)
        if connection.scalar(select(Attempt.report.is_not(None)).where(*this)):
            return  # an earlier try was committed, and only its response was lost
        if repair:
            auto_repair.mark_checkpoint_corrupt(connection, run, repair)
        ours = exists().where(Run.id == run.id, Run.lease_epoch == run.lease_epoch)
        connection.execute(update(Attempt).where(*this, ours).values(report=report.model_dump(mode="json")))

    return RunUpdate(store_report, NewEvent.from_payload("repair", at, repair.model_dump()) if repair else None)
