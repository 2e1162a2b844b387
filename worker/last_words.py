"""What is kept of an attempt that did not end well: how its process ended, its memory until then, its last lines."""

from typing import Any

from sqlalchemy import Connection, exists, select, update

from app.events.log import NewEvent
from app.runs.models import Attempt, Run
from worker import repairs
from worker.process import Exit
from worker.pump import Pump
from worker.repairs import Repair
from worker.spool import Step
from worker.vitals import Vitals

_LONGEST_LINE = 2000


def report(pump: Pump, vitals: Vitals, end: Exit, killed_for: str | None, repair: Repair | None) -> dict[str, Any]:
    """All of it, as JSON: `exit_code`, `exit_signal`, `killed_by_kernel`, `killed_for`, `phase`, `step`, `error`,
    `peaks`, `memory` (a timeline), `last_lines`, `repair`."""
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


def kept(run: Any, report: dict[str, Any], at: float) -> Step:
    """Stores it with the attempt, and tells of the repair, if there is one."""

    repair = report["repair"]

    def keep(connection: Connection) -> None:
        this = (Attempt.run_id == run.id, Attempt.attempt == run.attempt)
        if connection.scalar(select(Attempt.report.is_not(None)).where(*this)):
            return  # the commit of an earlier try has happened, and only its answer got lost
        if repair:
            repairs.remember(connection, run, repair)
        ours = exists().where(Run.id == run.id, Run.epoch == run.epoch)
        connection.execute(update(Attempt).where(*this, ours).values(report=report))

    return Step(keep, NewEvent.of("repair", at, repair) if repair else None)
