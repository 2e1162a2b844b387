"""Recorder of the result of an attempt, and of failures of other ranks than 0."""

import re
from collections.abc import Callable
from typing import Any

from anneal.contracts.attempt.messages import ResultRecord, TrainingResult
from app.infra.terminal_text import plain_text
from worker.ingest.attempt_state import AttemptState
from worker.ingest.record_parser import invalid_fields, validate_record
from worker.ingest.recorders.metrics import MetricRecorder

_ERROR_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_ERROR_TEXT = 8000
"""Characters of an error, which is part of the run, of its events and of the report of its attempt."""


class ResultRecorder:
    """Recorder of the results of the ranks of one attempt; that of rank 0 counts, if there is one."""

    def __init__(self, state: AttemptState, metrics: MetricRecorder, log_line: Callable[[str, str], None]) -> None:
        self._state, self._metrics, self._log_line = state, metrics, log_line
        self._other_failures: dict[int, TrainingResult] = {}
        """Failures of other ranks than 0."""

    @property
    def part_failure(self) -> tuple[int, TrainingResult] | None:
        """First failure that another rank than 0 has reported, with the rank; of a part, this is all there can be."""
        return next(iter(self._other_failures.items()), None)

    def record_result(self, record: dict[str, Any], _ts: float) -> None:
        """Take the result of rank 0."""
        result = self._read_result(record)
        self._state.failed_rank = result.get("rank") or 0
        self._end_with(result)

    def record_failure(self, rank: int, record: dict[str, Any]) -> None:
        """Take the failure of another rank than 0."""
        self._other_failures[rank] = self._read_result(record)

    def conclude(self) -> None:
        """Handle the end of the output: without a result of rank 0, the failure of another rank is the result."""
        if self._state.result is None and self.part_failure is not None:
            rank, result = self.part_failure
            relayed = result.get("rank")
            failed_rank = self._state.failed_rank = rank if relayed is None else relayed
            if (error := result.get("error")) and relayed is None:
                error["message"] = f"On rank {failed_rank}: {error['message']}"
            self._end_with(result)

    def _read_result(self, record: dict[str, Any]) -> TrainingResult:
        # An invalid detail, perhaps of a plugin, must not cost a run its outcome.
        if ignored := sorted(invalid_fields(ResultRecord, record) - {"outcome"}):
            self._log_line(f"invalid fields of the result are ignored: {', '.join(ignored)}", "warning")
        result = validate_record(ResultRecord, {name: value for name, value in record.items() if name not in ignored})
        if error := result.get("error"):
            error["code"] = error["code"] if _ERROR_CODE.fullmatch(error["code"]) else "internal"
            error["message"] = plain_text(error["message"])[:_MAX_ERROR_TEXT]
            if details := error.get("details"):
                details["summary"] = plain_text(details["summary"])[:_MAX_ERROR_TEXT]
        return result

    def _end_with(self, result: TrainingResult) -> None:
        self._state.result = result
        timer = self._metrics.timer
        timer.record_end(result["outcome"])
        self._metrics.store_timings(is_due=timer.training_started)
