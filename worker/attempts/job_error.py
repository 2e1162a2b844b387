"""Errors that keep a run from starting."""

from sqlalchemy import Engine, func, select

from app.tables.runs import Attempt
from worker.claimed_run import ClaimedRun

STORAGE_UNAVAILABLE = "storage_unavailable"
"""Code of a failure whose cause is the object store."""
_WAIT_SECONDS = 30.0
_MAX_WAIT_SECONDS = 300.0
_MAX_WAITS = 80
"""About six hours."""


class JobError(Exception):
    """Error that keeps a run from starting: a stable code and a sentence that says what to do next."""

    def __init__(self, code: str, message: str, is_transient: bool = False, pause_seconds: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.is_transient = is_transient
        """True if the cause is this worker: the run waits for another try, perhaps on another worker."""
        self.pause_seconds = pause_seconds
        """Seconds for which no worker should try again, where no worker is the cause; such a wait does not count as
        a try."""


def storage_unavailable(engine: Engine, run: ClaimedRun, reason: str, *, is_refused: bool) -> JobError:
    """Return the error of a run that needs what cannot be reached now, with a pause that is longer each time.

    The pause is None after hours, when tries count again, and 0 if the store refuses only this worker, which pauses
    itself (`WorkerHealth.failed`). Counts the attempts since the last one that started training.
    """
    began = select(func.max(Attempt.attempt)).where(Attempt.run_id == run.id, Attempt.start_step.is_not(None))
    with engine.connect() as connection:
        waits = run.attempt - (connection.scalar(began) or 0)
    pause = 0.0 if is_refused else min(_WAIT_SECONDS * waits, _MAX_WAIT_SECONDS)
    message = f"{reason}; the run waits for another try"
    return JobError(STORAGE_UNAVAILABLE, message, True, pause if waits <= _MAX_WAITS else None)
