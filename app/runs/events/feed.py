"""Feed of all runs: their `status`, `progress` and `end` events in one order, with numbers of their own.

Transactions of different runs commit in any order, so a number that a writer assigned could appear after a larger
one. A trigger only queues the events, in the transaction that stores them. The dispatcher numbers what is committed, in
one transaction at a time: a reader that has seen a number never finds a smaller one later. The events of a run keep
their order, and writers of different runs do not wait for each other.
"""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.webhooks.outbox import ENQUEUE_TAKEN

_AT_ONCE = 20_000
"""Events that a round numbers; with webhooks fewer, since each event may have a delivery to every one of them."""
_NUMBER = text(
    f"""
    WITH taken AS (
        DELETE FROM event_feed_queue
        WHERE position IN (
            SELECT position FROM event_feed_queue ORDER BY position
            LIMIT greatest(:limit / (1 + (SELECT count(*) FROM webhooks WHERE enabled)), 1)
        )
        RETURNING position, run_id, seq
    ), numbered AS (
        INSERT INTO event_feed (run_id, seq) SELECT run_id, seq FROM taken ORDER BY position
    ), enqueued AS (
        {ENQUEUE_TAKEN}
    )
    SELECT count(*) FROM taken
    """
)
NEWEST = text("SELECT max(number) FROM event_feed")
"""Select the number of the newest event; null if there is none."""
TRUNCATED = ""
"""Id of no run, in the place of the newest event that retention has dropped."""
READ_AFTER = text(
    """
    SELECT number, run_id, seq, type, ts, data::text FROM (
        SELECT *, coalesce(sum(pg_column_size(data)) OVER before, 0) AS bytes_before
        FROM (
            SELECT number, run_id, seq, type, ts, data FROM event_feed LEFT JOIN run_events USING (run_id, seq)
            WHERE number > :after AND (type IS NOT NULL OR run_id = '') ORDER BY number LIMIT :limit
        ) AS next
        WINDOW before AS (ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
    ) AS sized
    WHERE bytes_before < :most_bytes ORDER BY number
    """
)
"""Select events after a number: rows of number, run_id, seq, type, ts, data; ends like `log.READ_AFTER`.

Events of runs that are being deleted are left out. A row with the id `TRUNCATED` has no type and no data.
"""


async def number_events(connection: AsyncConnection) -> int:
    """Assign numbers to the events that wait, with their deliveries to webhooks, and return how many there were.

    The caller holds the lock of the dispatcher.
    """
    numbered: int = (await connection.execute(_NUMBER, {"limit": _AT_ONCE})).scalar_one()
    return numbered
