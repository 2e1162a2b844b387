"""Wire models of log lines."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from anneal.contracts.field_types import Timestamp

LogLevel = Literal["info", "warning", "error"]
LogStream = Literal["stdout", "stderr", "anneal"]


class LogLine(BaseModel):
    """Line of a log."""

    seq: int = Field(description="Position in the run's log of events.")
    ts: Timestamp
    attempt: int
    line: str
    stream: str = Field(description="`stdout` or `stderr` of the training process; `anneal`: message of the service.")
    level: str = Field(description="`info`, `warning` or `error`.")


class LogLines(BaseModel):
    """Part of a log."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "data": [
                    {
                        "seq": 41, "ts": "2026-01-02T03:04:05.678Z", "attempt": 1, "line": "step 10 loss 2.31",
                        "stream": "stdout", "level": "info",
                    }
                ],
                "has_more": True,
            }
        }
    )  # fmt: skip

    data: list[LogLine] = Field(description="In the order of the log.")
    has_more: bool = Field(description="True if there are more lines in the direction of reading.")


class CompleteLogLine(BaseModel):
    """Line of a complete log."""

    ts: Timestamp
    line: str
    stream: str = Field(description="`stdout` or `stderr` of the training process; `anneal`: message of the service.")
    level: str = Field(description="`info`, `warning` or `error`.")


class CompleteLogHits(BaseModel):
    """Lines of an attempt's complete log that contain a text; the stream lacks some lines of this attempt."""

    attempt: int
    left_out: int = Field(description="Lines of the attempt that only its complete log has.")
    complete_log: str = Field(description="Path of the complete log.")
    matches: int | None = Field(
        description="Lines that contain the text, with those that the stream has too; null if it cannot be searched."
    )
    data: list[CompleteLogLine] = Field(
        description="The newest of them, in order; at most 100 in all attempts together."
    )
    problem: str | None = Field(description="Why it cannot be searched, or why its end was not.")


class LogHits(BaseModel):
    """Lines that contain a text."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "data": [41, 97],
                "has_more": False,
                "complete": [
                    {
                        "attempt": 1, "left_out": 18000,
                        "complete_log": "/v1/runs/run_01k3x9m6q2v8s4t0w7y5z1a3b6/logs/complete?attempt=1", "matches": 1,
                        "data": [
                            {
                                "ts": "2026-01-02T03:04:05.678Z", "line": "loss nan", "stream": "stdout",
                                "level": "info",
                            }
                        ],
                        "problem": None,
                    }
                ],
            }
        }
    )  # fmt: skip

    data: list[int] = Field(description="`seq` of the lines, in order; the newest if there are too many.")
    has_more: bool = Field(description="True if older lines contain it too.")
    complete: list[CompleteLogHits] = Field(
        default_factory=list,
        description="Matches in the complete logs of attempts from which the stream left out lines.",
    )
