"""Events as readers get them: encoded once, and what takes the place of those that are no longer kept."""

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from app.runs.models import TERMINAL


@dataclass(frozen=True, slots=True)
class Frame:
    """One event, encoded once for all readers."""

    seq: int
    type: str
    json: bytes

    @property
    def sse(self) -> bytes:
        """The frame of a `text/event-stream`."""
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self.seq, self.type.encode(), self.json)

    @property
    def line(self) -> bytes:
        """The same as a line of JSON, with the event's type in it."""
        return b'{"type":"%s",%s\n' % (self.type.encode(), self.json[1:])


class Batch(list[Frame]):
    """Frames that go out together; encoded once, however many readers send them."""

    oldest: datetime | None = None
    """When the first of them happened, where they came from the database together."""

    @cached_property
    def sse(self) -> bytes:
        """All of them as `text/event-stream`."""
        return b"".join(frame.sse for frame in self)

    @cached_property
    def lines(self) -> bytes:
        """All of them as lines of JSON."""
        return b"".join(frame.line for frame in self)

    @cached_property
    def size(self) -> int:
        """About how many bytes it holds."""
        return sum(len(frame.json) for frame in self)


def in_place_of_dropped(run_id: str, run: Any, cursor: int) -> Batch:
    """What a reader behind `cursor` gets for events that retention has dropped; empty where it misses none.

    That they are gone, and the end, where that is too. The end keeps its `seq`: what is told before is before it.
    """
    told = Batch()
    id = run_id.encode()
    is_over = run.status in TERMINAL and run.first_seq > run.event_seq
    reached = run.event_seq - 1 if is_over else run.first_seq - 1
    if cursor < reached:
        told.append(Frame(reached, "truncated", b'{"run_id":"%s","first_seq":%d}' % (id, run.first_seq)))
    if is_over and cursor < run.event_seq:
        end = b'{"run_id":"%s","seq":%d,"status":"%s"}' % (id, run.event_seq, run.status.encode())
        told.append(Frame(run.event_seq, "end", end))
    return told
