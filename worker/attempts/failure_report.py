"""Failure report of an attempt: exit status, memory timeline and last log lines."""

from typing import Any

from sqlalchemy import Connection, exists, select, update

from app.runs.events.log import NewEvent
from app.tables.runs import Attempt, Run
from worker.attempts import auto_repair
from worker.attempts.auto_repair import Repair
from worker.attempts.memory_watch import MemoryWatch
from worker.ingest.record_handler import RecordHandler
from worker.ingest.spool import RunUpdate
from worker.process.training_process import Exit

_LONGEST_LINE = 2000


def build_failure_report(
    pump: RecordHandler, vitals: MemoryWatch, end: Exit, killed_for: str | None, repair: Repair | None
) -> dict[str, Any]:
    """Build the failure report of an attempt as a JSON object.

    Keys: `exit_code`, `exit_signal`, `killed_by_kernel`, `killed_for`, `phase`, `step`, `error`, `peaks`, `memory` (a
    timeline), `last_lines`, `repair`.
    """
    return {
        "exit_code": end.code,
        "exit_signal": end.signal,
        "killed_by_kernel": end.out_of_memory,
        "killed_for": killed_for,
        "phase": pump.phase,
        "step": pump.step,
        "error": (pump.result or {}).get("error"),
        "peaks": vitals.peaks,
        "memory": vitals.timeline,
        "last_lines": [line[:_LONGEST_LINE] for line in pump.tail],
        "repair": repair.stored() if repair else None,
    }


def store_failure_report(run: Any, report: dict[str, Any], at: float) -> RunUpdate:
    """Return an update that stores the report with the attempt and, if there is a repair, its event."""
    repair = report["repair"]

    def keep(connection: Connection) -> None:
        this = (Attempt.run_id == run.id, Attempt.attempt == run.attempt)
        if connection.scalar(select(Attempt.report.is_not(None)).where(*this)):
            return  # an earlier try was committed, and only its response was lost
        if repair:
            auto_repair.remember(connection, run, repair)
        ours = exists().where(Run.id == run.id, Run.epoch == run.epoch)
        connection.execute(update(Attempt).where(*this, ours).values(report=report))

    return RunUpdate(keep, NewEvent.of("repair", at, repair) if repair else None)
