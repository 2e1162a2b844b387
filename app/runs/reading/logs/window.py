"""Windows of a run's log: lines before or after a `seq`, and the lines that contain a text."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.schemas.logs import LogLevel, LogLine, LogStream
from app.tables.events import RunEvent

_DATA = RunEvent.__table__.c.data
_LINE = _DATA["line"].astext


async def read_lines(
    session: AsyncSession, run_id: str, *, before: int | None, after: int | None, limit: int, where: Sequence[Any] = ()
) -> tuple[list[LogLine], bool]:
    """Return lines in order, and whether there are more in the direction of reading.

    Reads forward from `after` if it is given, otherwise backward from `before` (None: from the newest line).
    """
    columns = (RunEvent.seq, RunEvent.ts, RunEvent.attempt, _LINE, _DATA["stream"].astext, _DATA["level"].astext)
    query = select(*columns).where(RunEvent.run_id == run_id, RunEvent.type == "log", *where)
    if after is not None:
        query = query.where(RunEvent.seq > after)
    if before is not None:
        query = query.where(RunEvent.seq < before)
    order = RunEvent.seq if after is not None else RunEvent.seq.desc()
    rows = (await session.execute(query.order_by(order).limit(limit + 1))).all()
    page = rows[:limit] if after is not None else rows[:limit][::-1]
    log_lines = [
        LogLine(seq=seq, ts=ts, attempt=attempt, line=line or "", stream=stream or "stdout", level=level or "info")
        for seq, ts, attempt, line, stream, level in page
    ]
    return log_lines, len(rows) > limit


async def find_hits(
    session: AsyncSession, run_id: str, phrase: str, *, before: int | None, limit: int, where: Sequence[Any] = ()
) -> tuple[list[int], bool]:
    """Return the `seq` of the newest lines that contain a text, in order, and whether there are older ones."""
    query = select(RunEvent.seq).where(
        RunEvent.run_id == run_id, RunEvent.type == "log", func.strpos(_LINE, phrase) > 0, *where
    )
    if before is not None:
        query = query.where(RunEvent.seq < before)
    seqs = (await session.scalars(query.order_by(RunEvent.seq.desc()).limit(limit + 1))).all()
    return list(seqs[:limit][::-1]), len(seqs) > limit


def selected_levels(level: LogLevel | None) -> tuple[LogLevel, ...] | None:
    """Return the levels that a filter selects; None: any."""
    if level is None:
        return None
    return ("warning", "error") if level == "warning" else (level,)


def filter_conditions(
    level: LogLevel | None, stream: LogStream | None, attempt: int | None
) -> list[ColumnElement[bool]]:
    """Return the conditions of a filter; None: any."""
    conditions: list[ColumnElement[bool]] = []
    if (accepted_levels := selected_levels(level)) is not None:
        conditions.append(_DATA["level"].astext.in_(accepted_levels))
    if stream is not None:
        conditions.append(func.coalesce(_DATA["stream"].astext, "stdout") == stream)
    if attempt is not None:
        conditions.append(RunEvent.attempt == attempt)
    return conditions
