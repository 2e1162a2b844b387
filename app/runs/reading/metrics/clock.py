"""Times of the steps of a run, from the events at the ends of its roll-ups."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.schemas.runs.curves import Clock
from app.runs.reading.metrics.curves import _valid_stretches
from app.runs.reading.metrics.rollups import highest_level, points_of

_MOST_ROWS = 100
_PASSES = text(
    """
    SELECT attempt, segment, kind, first_step, last_step, points FROM metric_rollups
    WHERE run_id = :run_id AND level = 0 AND kind = 'metric' ORDER BY attempt, segment
    """
)
_TIMES = text(
    """
    WITH pieces AS (
        SELECT row.first_step, row.first_seq, row.last_step, row.last_seq, wanted.low, wanted.high
        FROM unnest(
            cast(:attempts AS int[]), cast(:segments AS int[]), cast(:levels AS int[]),
            cast(:lows AS bigint[]), cast(:highs AS bigint[])
        ) AS wanted(attempt, segment, level, low, high)
        CROSS JOIN LATERAL (
            SELECT * FROM metric_rollups WHERE run_id = :run_id AND attempt = wanted.attempt
                AND segment = wanted.segment AND kind = 'metric' AND level = wanted.level
                AND first_step <= wanted.high AND last_step >= wanted.low
        ) AS row
    ), ends AS (
        SELECT first_step AS step, first_seq AS seq FROM pieces WHERE first_step BETWEEN low AND high
        UNION SELECT last_step, last_seq FROM pieces WHERE last_step BETWEEN low AND high
    )
    SELECT step, cast(extract(epoch FROM event.ts - run.started_at) AS float) AS seconds
    FROM ends JOIN runs AS run ON run.id = :run_id
    JOIN run_events AS event ON event.run_id = run.id AND event.seq = ends.seq
    WHERE run.started_at IS NOT NULL ORDER BY step
    """
)


async def read_clock(session: AsyncSession, run_id: str) -> Clock:
    """Return the times of at most some hundred steps, of the newest pass; none of events that were pruned."""
    rows = (await session.execute(_PASSES, {"run_id": run_id})).all()
    stretches = _valid_stretches(rows)
    level = 1
    while sum(stretch.about for stretch in stretches) > points_of(level) * _MOST_ROWS:
        level += 1
    parameters = {
        "attempts": [stretch.row.attempt for stretch in stretches],
        "segments": [stretch.row.segment for stretch in stretches],
        "levels": [min(level, highest_level(stretch.row.points)) for stretch in stretches],
        "lows": [stretch.low for stretch in stretches],
        "highs": [stretch.high for stretch in stretches],
    }
    times = (await session.execute(_TIMES, {"run_id": run_id, **parameters})).all() if stretches else []
    return Clock(steps=[row.step for row in times], seconds=[round(row.seconds, 3) for row in times])
