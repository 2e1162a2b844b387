"""What a trainer answers to an action: the change of its row, and the event that tells of it."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Executable, func, update

from app.actions.models import RunAction
from app.events.log import NewEvent

_OUTCOMES = ("done", "refused", "failed")


@dataclass(frozen=True)
class Answer:
    """To be stored in one transaction, which the event's place in the log fences."""

    change: Executable
    event: NewEvent


def answer(run: Any, record: dict[str, Any], ts: float) -> Answer:
    """Of a trainer's record {id, action, step, status, result, message}.

    An action that an attempt does once more, since it goes on from an earlier step, is told once more and stays done:
    with its new result, or with the one that it had where it does not work this time.

    Raises:
        ValueError, KeyError, TypeError: it is no such record.
    """
    status, step = record["status"], record["step"]
    if status not in _OUTCOMES or isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**31:
        raise ValueError(f"an action cannot be {status!r} at step {step!r}")
    told = {name: record.get(name) for name in ("action", "step", "status", "result", "message")}
    outcome = {
        "status": status,
        "step": step,
        "attempt": run.attempt,
        "result": record.get("result"),
        "message": record.get("message"),
        "finished_at": func.clock_timestamp(),
    }
    action_id = str(record["id"])
    before = ("waiting", "done") if status == "done" else ("waiting",)
    asked = (RunAction.id == action_id, RunAction.run_id == run.id, RunAction.status.in_(before))
    change = update(RunAction).where(*asked).values(outcome)
    return Answer(change, NewEvent.of("action", ts, {"action_id": action_id, **told}))
