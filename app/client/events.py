"""The events of a run, typed, and the way to follow them: in order, each once, whatever happens to the connection."""

import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import httpx
from httpx_sse import ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field

from app.client.errors import AnnealError
from app.client.transport import Backoff, Session
from app.runs.config import TrainingStatus
from app.wire import Moment

log = logging.getLogger(__name__)

# The service gives a sign of life every 15 s; a connection that is silent for three of them is dead.
_TIMEOUT = httpx.Timeout(10.0, read=45.0)


class Event(BaseModel):
    """What every event has. One of a type that this version does not know is an `Event` with whatever it carries."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    type: str
    run_id: str
    seq: int
    ts: Moment | None = None


class StatusEvent(Event):
    """The run went from one status to another."""

    type: Literal["status"]
    from_: TrainingStatus | None = Field(default=None, alias="from")
    to: TrainingStatus
    reason: str | None = None
    attempt: int = 0


class LogEvent(Event):
    """A line that the training process printed, or a remark of the service (`stream` is then `anneal`)."""

    type: Literal["log"]
    line: str
    stream: str = "stdout"
    level: str = "info"


class MetricEvent(Event):
    """A point of the curves."""

    type: Literal["metric"]
    step: int
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    gpu_memory_mb: float | None = None
    samples_per_second: float | None = None
    extra: dict[str, Any] = Field(default_factory=dict)


class EvalEvent(Event):
    """The result of an evaluation."""

    type: Literal["eval"]
    step: int
    epoch: float | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)


class CheckpointEvent(Event):
    """A checkpoint that can be resumed from."""

    type: Literal["checkpoint"]
    checkpoint_id: str
    step: int
    kind: str


class ConfigEvent(Event):
    """What the trainer really uses, which defaults it replaced, and first facts."""

    type: Literal["config"]
    effective: dict[str, Any] = Field(default_factory=dict)
    replaced: list[dict[str, Any]] = Field(default_factory=list)
    facts: dict[str, Any] = Field(default_factory=dict)


class ProgressEvent(Event):
    """How far a phase is, in units of that phase."""

    type: Literal["progress"]
    phase: str
    done: float | None = None
    total: float | None = None
    message: str | None = None


class SampleEvent(Event):
    """A text that the model wrote."""

    type: Literal["sample"]
    step: int
    prompt: str
    completion: str


class ActionEvent(Event):
    """What came of something that was asked of the run while it trained; it took effect behind `step`."""

    type: Literal["action"]
    action_id: str
    action: str
    step: int
    status: str
    result: dict[str, Any] | None = None
    message: str | None = None


class RepairEvent(Event):
    """The run failed and goes on by itself, with something changed: an attempt of smaller micro-batches, or without
    the step that spoilt it."""

    type: Literal["repair"]
    kind: str
    reason: str
    step: int | None = None
    rows: list[int] = Field(default_factory=list)
    singled_out: list[int] = Field(default_factory=list)
    changes: dict[str, Any] = Field(default_factory=dict)


class ErrorEvent(Event):
    """Why the run failed."""

    type: Literal["error"]
    code: str
    message: str


class EndEvent(Event):
    """The last event of a run."""

    type: Literal["end"]
    status: TrainingStatus


class TruncatedEvent(Event):
    """In place of older events, which are no longer kept."""

    type: Literal["truncated"]
    first_seq: int


_TYPES: dict[str, type[Event]] = {
    "status": StatusEvent, "log": LogEvent, "metric": MetricEvent, "eval": EvalEvent, "checkpoint": CheckpointEvent,
    "config": ConfigEvent, "progress": ProgressEvent, "sample": SampleEvent, "action": ActionEvent,
    "repair": RepairEvent, "error": ErrorEvent, "end": EndEvent, "truncated": TruncatedEvent,
}  # fmt: skip


class Follower:
    """One reader's place in the events of a run."""

    def __init__(self, session: Session, path: str, params: dict[str, Any], *, after: int | None, whole: bool) -> None:
        """`whole` says that every event is asked for, so that one that is missing can be told."""
        self._session = session
        self._path = path
        self._params = params
        self._whole = whole
        self._last = after or 0
        self._cursor: int | None = None
        """What the service is to go on behind; None: it has said nothing yet."""
        self._progressed = False

    async def follow(self, patience: float, until: int | None = None) -> AsyncGenerator[Event]:
        """All events to the end of the run; or, with `until`, all that are stored, at least up to that one.

        Raises:
            AnnealError: the service refuses, an event is missing, or nothing is heard for `patience` seconds.
        """
        backoff = Backoff()
        heard, told = time.monotonic(), False
        while until is None or self._last < until:
            self._progressed = False
            asked_for = None
            try:
                async with aclosing(self._connection()) as events:
                    async for event in events:
                        if event is None:
                            return
                        yield event
                        if event.type == "end":
                            return
                if until is not None and not self._progressed:
                    return  # the end of what is stored: it closed in order, with nothing new
            except AnnealError as error:
                if self._progressed:
                    heard = time.monotonic()
                if not error.is_passing or time.monotonic() - heard > patience:
                    raise
                if not self._progressed and not told:
                    # Once for each absence; where nobody has set up logging, Python shows a warning on standard error.
                    log.warning("%s Trying again for up to %.0f s.", error.detail, patience)
                    told = True
                asked_for = error.retry_after
            if self._progressed:
                heard, told = time.monotonic(), False
                backoff.reset()
            await self._session.transport.pause(backoff.next(asked_for))

    async def _connection(self) -> AsyncGenerator[Event | None]:
        """The events of one connection; None where nothing will ever come any more."""
        transport = self._session.transport
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self._cursor is not None:
            headers["Last-Event-ID"] = str(self._cursor)
        request = transport.build("GET", self._path, params=self._params, headers=headers, timeout=_TIMEOUT)
        response = await self._session.attempt(request)
        try:
            if response.status_code == 204:
                yield None
                return
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise AnnealError(
                    "unexpected_answer",
                    f"{transport.url} answers no events: see that ANNEAL_URL names an Anneal service.",
                )
            async with aclosing(transport.sse(response)) as sent:
                async for one in sent:
                    if one.data:
                        yield self._take(one)
                    elif one.id.isdigit():  # a sign of life, which may be far behind the last event that was wanted
                        self._cursor = max(int(one.id), self._cursor or 0)
                        self._progressed = True
        finally:
            await transport.release(response)

    def _take(self, sent: ServerSentEvent) -> Event:
        try:
            event = parse(sent)
        except ValueError as error:
            raise AnnealError("stream_broken", f"The stream of {self._path} has an event unlike any: {error}") from None
        expected = self._last + 1
        # One that stands for dropped events may leap, and tell a reader who was just there that it has missed nothing.
        is_next = event.seq >= self._last if event.type == "truncated" else event.seq == expected
        if not is_next and (self._whole or event.seq < expected):
            raise AnnealError(
                "stream_broken",
                f"The stream of {self._path} went from event {self._last} to {event.seq}: the service lost or repeated "
                "events. Read it anew from the beginning, and report this.",
            )
        self._last = self._cursor = event.seq
        self._progressed = True
        return event


def parse(sent: ServerSentEvent) -> Event:
    """The typed event in a frame; raises `ValueError` for what is none."""
    data = json.loads(sent.data)
    return _TYPES.get(sent.event, Event).model_validate({"seq": int(sent.id), **data, "type": sent.event})
