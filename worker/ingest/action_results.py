"""Results of actions: the update of the action's row and the event that reports it."""

from dataclasses import dataclass

from sqlalchemy import Executable, func, update

from anneal.contracts.attempt.messages import ActionRecord
from app.runs.events.log import NewEvent
from app.tables.actions import RunAction
from worker.claimed_run import ClaimedRun


@dataclass(frozen=True)
class ActionResult:
    """Row update and event of one action result, stored in one transaction that appending the event fences."""

    change: Executable
    event: NewEvent


def action_result(run: ClaimedRun, record: ActionRecord, ts: float) -> ActionResult:
    """Build the row update and the event from a trainer's record.

    An attempt that resumes from an earlier step repeats actions. A repeated action is reported again and stays `done`,
    with its new result, or with the previous one if the repetition fails.

    Raises:
        ValueError: The step is out of range.
    """
    status, step = record["status"], record["step"]
    if not 0 <= step < 2**31:
        raise ValueError(f"an action cannot take effect after step {step}")
    reported = {name: record.get(name) for name in ("action", "step", "status", "result", "message")}
    outcome = {
        "status": status,
        "step": step,
        "attempt": run.attempt,
        "result": record.get("result"),
        "message": record.get("message"),
        "finished_at": func.clock_timestamp(),
    }
    action_id = record["id"]
    before = ("waiting", "done") if status == "done" else ("waiting",)
    is_pending = (RunAction.id == action_id, RunAction.run_id == run.id, RunAction.status.in_(before))
    change = update(RunAction).where(*is_pending).values(outcome)
    return ActionResult(change, NewEvent.from_payload("action", ts, {"action_id": action_id, **reported}))
