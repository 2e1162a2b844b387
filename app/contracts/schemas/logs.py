"""Wire models of log lines."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from app.contracts.field_types import Timestamp

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


class LogHits(BaseModel):
    """Lines that contain a text."""

    model_config = ConfigDict(json_schema_extra={"example": {"data": [41, 97], "has_more": False}})

    data: list[int] = Field(description="`seq` of the lines, in order; the newest if there are too many.")
    has_more: bool = Field(description="True if older lines contain it too.")
