"""Sources of streams: the log of one run, and the feed of all runs."""

from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from app.infra.broker import ALL_RUNS
from app.runs.events import feed, log
from app.runs.events.frames import Batch, Frame, truncation_frames
from app.tables.runs import Run


class Source(Protocol):
    """Ordered events in the database, each with a number that is its cursor."""

    @property
    def channel(self) -> str:
        """Run id or `ALL_RUNS`, under which the broker announces new events."""

    @property
    def last_type(self) -> str | None:
        """Type of the event after which no more follow; None if there is none."""

    async def read_batch(self, connection: AsyncConnection, after: int, limit: int, most_bytes: int) -> Batch:
        """Return at most `limit` events after a cursor; the last one is that with which they reach `most_bytes`."""

    async def read_missed(self, connection: AsyncConnection, position: int) -> Batch | None:
        """Return the frames for dropped events after a position; None if no more events follow."""

    def cursor_frame(self, position: int) -> Frame:
        """Return the frame that carries the position of a reader."""


@dataclass(frozen=True)
class RunSource:
    """Log of a run; the cursor is `seq`."""

    run_id: str
    last_type: str | None = "end"

    @property
    def channel(self) -> str:
        return self.run_id

    async def read_batch(self, connection: AsyncConnection, after: int, limit: int, most_bytes: int) -> Batch:
        place = {"run_id": self.run_id, "after": after, "limit": limit, "most_bytes": most_bytes}
        rows = (await connection.execute(log.READ_AFTER, place)).all()
        batch = Batch(
            Frame(seq, kind, log.event_json(self.run_id, seq, ts, data).encode()) for seq, kind, ts, data in rows
        )
        batch.oldest = rows[0][2] if rows else None
        return batch

    async def read_missed(self, connection: AsyncConnection, position: int) -> Batch | None:
        query = select(Run.status, Run.event_seq, Run.first_seq).where(Run.id == self.run_id)
        run = (await connection.execute(query)).one_or_none()
        return None if run is None else truncation_frames(self.run_id, run, position)

    def cursor_frame(self, position: int) -> Frame:
        return Frame(position, "cursor", b'{"run_id":"%s","seq":%d}' % (self.run_id.encode(), position))


@dataclass(frozen=True)
class FeedSource:
    """Feed of all runs; the cursor is the number of the event in the feed, and a field of its data."""

    channel: str = ALL_RUNS
    last_type: str | None = None

    async def read_batch(self, connection: AsyncConnection, after: int, limit: int, most_bytes: int) -> Batch:
        place = {"after": after, "limit": limit, "most_bytes": most_bytes}
        rows = (await connection.execute(feed.READ_AFTER, place)).all()
        return Batch(
            Frame(number, "truncated", b'{"cursor":%d}' % number)
            if run_id == feed.TRUNCATED
            else Frame(number, kind, f'{{"cursor":{number},{log.event_json(run_id, seq, ts, data)[1:]}'.encode())
            for number, run_id, seq, kind, ts, data in rows
        )

    async def read_missed(self, connection: AsyncConnection, position: int) -> Batch | None:
        return Batch()  # `read_batch` returns what stands for them

    def cursor_frame(self, position: int) -> Frame:
        return Frame(position, "cursor", b'{"cursor":%d}' % position)
