"""Encoded events for readers, and the frames sent instead of events that retention has dropped."""

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from anneal.contracts.run_status import TERMINAL


@dataclass(frozen=True, slots=True)
class Frame:
    """Event, encoded once for all readers."""

    seq: int
    type: str
    json: bytes

    @property
    def sse(self) -> bytes:
        """Frame of a `text/event-stream`."""
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self.seq, self.type.encode(), self.json)

    @property
    def line(self) -> bytes:
        """Line of JSON that includes the event's type."""
        return b'{"type":"%s",%s\n' % (self.type.encode(), self.json[1:])


class Batch(list[Frame]):
    """Frames that are sent together; encoded once for all readers."""

    oldest: datetime | None = None
    """Time of the first event, if the frames were read from the database in one query."""

    @cached_property
    def sse(self) -> bytes:
        """All frames as `text/event-stream`."""
        return b"".join(frame.sse for frame in self)

    @cached_property
    def lines(self) -> bytes:
        """All frames as lines of JSON."""
        return b"".join(frame.line for frame in self)

    @cached_property
    def size(self) -> int:
        """Approximate size in bytes."""
        return sum(len(frame.json) for frame in self)


def truncation_frames(run_id: str, run: Any, cursor: int) -> Batch:
    """Return the frames sent to a reader at `cursor` instead of dropped events; empty if it misses none.

    These are a `truncated` frame, and the `end` event if that was dropped as well. `end` keeps its `seq`, so the
    `truncated` frame gets a smaller one.
    """
    frames = Batch()
    id = run_id.encode()
    is_over = run.status in TERMINAL and run.first_seq > run.event_seq
    reached = run.event_seq - 1 if is_over else run.first_seq - 1
    if cursor < reached:
        frames.append(Frame(reached, "truncated", b'{"run_id":"%s","first_seq":%d}' % (id, run.first_seq)))
    if is_over and cursor < run.event_seq:
        end = b'{"run_id":"%s","seq":%d,"status":"%s"}' % (id, run.event_seq, run.status.encode())
        frames.append(Frame(run.event_seq, "end", end))
    return frames
