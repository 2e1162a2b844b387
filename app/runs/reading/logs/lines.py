"""Log lines of a run: the `log` events of its stream, as plain text or as server-sent events."""

import json
from collections.abc import AsyncIterator

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.runs.events.frames import Frame
from app.runs.events.responses import Batches
from app.tables.events import RunEvent
from app.tables.runs import Run


async def find_tail_cursor(session: AsyncSession, run: Run, tail: int | None, grep: str | None) -> int:
    """Return the `seq` after which the last `tail` lines (None: all) that contain `grep` begin."""
    if tail == 0:
        return run.event_seq
    if tail is None:
        return run.first_seq - 1
    query = select(RunEvent.seq).where(RunEvent.run_id == run.id, RunEvent.type == "log", RunEvent.seq <= run.event_seq)
    if grep:
        query = query.where(func.strpos(RunEvent.__table__.c.data["line"].astext, grep) > 0)
    newest = query.order_by(RunEvent.seq.desc()).limit(tail).subquery()
    first, count = (await session.execute(select(func.min(newest.c.seq), func.count()))).one()
    if count == 0:
        return run.event_seq
    return int(first) - 1 if count == tail else run.first_seq - 1


async def follow_lines(batches: Batches, grep: str | None) -> AsyncIterator[str]:
    """Yield lines as they arrive, without line ends."""
    async for _, frames in batches:
        for frame in frames:
            if (line := _line_text(frame, grep)) is not None:
                yield line


async def as_text(batches: Batches, grep: str | None) -> AsyncIterator[bytes]:
    """Yield lines as they arrive, as a `text/plain` body."""
    async for _, frames in batches:
        lines = [line for frame in frames if (line := _line_text(frame, grep)) is not None]
        if lines:
            yield ("\n".join(lines) + "\n").encode()


def is_shown(frame: Frame, grep: str | None) -> bool:
    """Return True for a `log` event that contains `grep`, and for `end`."""
    return frame.type == "end" or _line_text(frame, grep) is not None


def _line_text(frame: Frame, grep: str | None) -> str | None:
    if frame.type != "log":
        return None
    line: str = json.loads(frame.json).get("line", "")
    return line if not grep or grep in line else None
