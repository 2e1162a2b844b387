"""Partitions of the event log: each month gets one, whatever the default partition has."""

import threading
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, text

from app.infra.ids import id_at
from app.tables.events import ensure_partitions, month_after
from tests.rows import waiting_for_locks
from tests.waiting import eventually

LATER = datetime(2047, 5, 10, tzinfo=UTC)
INSERT = text("INSERT INTO run_events VALUES (:id, :seq, :type, 1, now(), '{}')")


def counts(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        query = text("SELECT cast(cast(tableoid AS regclass) AS text), count(*) FROM run_events GROUP BY 1")
        return {row[0]: row[1] for row in connection.execute(query)}


@pytest.fixture
def ids(engine: Engine) -> list[str]:
    """Events of runs whose ids are years ahead: two of one month, one of the next, and one after all partitions."""
    moments = [LATER, LATER + timedelta(days=3), month_after(LATER), LATER + timedelta(days=400)]
    ids = [id_at("run", moment) for moment in moments]
    with engine.begin() as connection:
        connection.execute(INSERT, [{"id": id, "seq": seq, "type": "status"} for id in ids for seq in (1, 2)])
    return ids


def test_events_of_a_time_ahead_move_to_the_partition_of_their_month(engine: Engine, ids: list[str]) -> None:
    assert counts(engine) == {"run_events_default": 8}
    with engine.begin() as connection:
        fed = connection.scalar(text("SELECT count(*) FROM event_feed_queue"))
        ensure_partitions(connection, LATER)
        assert connection.scalar(text("SELECT count(*) FROM event_feed_queue")) == fed, "none is fed again"
    assert counts(engine) == {"run_events_2047_05": 4, "run_events_2047_06": 2, "run_events_default": 2}
    with engine.begin() as connection:
        connection.execute(INSERT, {"id": ids[0], "seq": 3, "type": "status"})
        assert connection.scalar(text("SELECT count(*) FROM event_feed_queue")) == fed + 1, "new ones are"
        indexes = text("SELECT count(*) FROM pg_indexes WHERE tablename = :name")
        assert connection.scalar(indexes, {"name": "run_events_2047_05"}) == 3
        assert ensure_partitions(connection, LATER) == []


def test_an_event_that_is_appended_meanwhile_moves_too(engine: Engine, ids: list[str]) -> None:
    thread = threading.Thread(target=lambda: _ensure(engine))
    with engine.begin() as connection:
        connection.execute(INSERT, {"id": ids[0], "seq": 3, "type": "log"})
        thread.start()
        eventually(lambda: waiting_for_locks(engine))
    thread.join(30)
    assert counts(engine)["run_events_2047_05"] == 5


def _ensure(engine: Engine) -> None:
    with engine.begin() as connection:
        ensure_partitions(connection, LATER)
