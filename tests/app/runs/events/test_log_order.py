"""The event log from outside: who may append to a run, and what a reader finds while others append."""

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from app.runs.events.log import LeaseFenced, NewEvent, append_events
from app.runs.state import machine
from tests.rows import add_run, add_worker, claim, events_of, run_row

LINES = [NewEvent.from_payload("log", 1_700_000_000.0, {"line": "a line"}) for _ in range(3)]


@pytest.fixture
def run(engine: Engine) -> str:
    """Claimed, with two events."""
    run = add_run(engine)
    claim(engine, add_worker(engine))
    return run.id


def test_a_stale_worker_writes_nothing_into_the_attempt_that_followed(engine: Engine, run: str) -> None:
    """The next attempt is live and has stored as much as the stale worker believes: only the epoch tells them apart."""
    with engine.begin() as connection:
        connection.execute(machine.release(run, 1, "drain"))
    assert claim(engine, add_worker(engine)).lease_epoch == 3
    before = events_of(engine, run)
    with pytest.raises(LeaseFenced), engine.begin() as connection:
        append_events(connection, run, 1, 1, LINES)
    assert events_of(engine, run) == before
    assert run_row(engine, run).attempt_event_count == 0


def test_numbers_are_committed_in_their_order_so_a_reader_never_finds_a_smaller_one_later(
    engine: Engine, run: str
) -> None:
    with engine.connect() as appending:
        append_events(appending, run, 1, 1, LINES)  # seq 3 to 5, not committed yet
        try:
            with engine.begin() as other:
                other.execute(text("SET LOCAL lock_timeout = '300ms'"))
                other.execute(machine.begin(run, 1, 0, 0.0, 10, None))
        except OperationalError:
            pass  # it has to wait, so nobody sees its event before those
        seen = [event.seq for event in events_of(engine, run)]
        assert seen == list(range(1, len(seen) + 1)), "a reader whose cursor is at the last would miss some"
        appending.commit()
    assert [event.seq for event in events_of(engine, run)] == [1, 2, 3, 4, 5]
