"""Sink of what the recorders of an attempt have to store."""

from typing import Protocol

from app.runs.events.log import NewEvent, Progress
from worker.ingest.spool import RunUpdate


class EventSink(Protocol):
    """Receiver of events and changes of an attempt."""

    progress: Progress | None
    """Progress of the trainer."""

    def enqueue_item(self, item: NewEvent | RunUpdate) -> None:
        """Append an item; never waits."""
