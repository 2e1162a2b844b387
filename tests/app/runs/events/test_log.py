"""The event log: gap-free, duplicate-free, fenced."""

import json
import random
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from app.config import Settings
from app.infra.db import sync_engine
from app.runs.events import log
from app.runs.events.log import LeaseFenced, NewEvent, Progress, append_events
from app.runs.state import machine
from tests.rows import add_run, add_worker, claim, events_of, run_row, waiting_for_locks
from tests.waiting import eventually


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    engine = sync_engine(settings.database_url or "", pool_size=10)
    yield engine
    engine.dispose()


def lines(first: int, count: int) -> list[NewEvent]:
    return [
        NewEvent.from_payload("log", 1_700_000_000.0 + n, {"line": f"line {n}"}) for n in range(first, first + count)
    ]


def store(engine: Engine, run_id: str, epoch: int, first: int, count: int, progress: Progress | None = None) -> None:
    with engine.begin() as connection:
        append_events(connection, run_id, epoch, first, lines(first, count), progress)


def stored_lines(engine: Engine, run_id: str) -> list[str]:
    events = events_of(engine, run_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return [event.data["line"] for event in events if event.type == "log"]


@pytest.fixture
def run(engine: Engine) -> str:
    run = add_run(engine)
    claim(engine, add_worker(engine))
    return run.id


def expected(count: int) -> list[str]:
    return [f"line {n}" for n in range(1, count + 1)]


class TestAppend:
    def test_stores_a_batch_behind_what_is_there(self, engine: Engine, run: str) -> None:
        store(engine, run, 1, 1, 3, Progress(step=7, epoch=0.5, total_steps=20, best_loss=1.5))
        store(engine, run, 1, 4, 2, Progress(step=8, epoch=0.6, total_steps=20, best_loss=1.7))
        assert stored_lines(engine, run) == expected(5)
        row = run_row(engine, run)
        assert (row.event_seq, row.attempt_event_count, row.current_step, row.total_steps, row.best_loss) == (
            7,
            5,
            8,
            20,
            1.5,
        )

    def test_sent_again_is_stored_once(self, engine: Engine, run: str) -> None:
        store(engine, run, 1, 1, 3)
        store(engine, run, 1, 1, 3)
        assert stored_lines(engine, run) == expected(3)

    def test_sent_again_with_more_behind_it_stores_the_rest(self, engine: Engine, run: str) -> None:
        store(engine, run, 1, 1, 3)
        store(engine, run, 1, 1, 5)
        assert stored_lines(engine, run) == expected(5)

    def test_sent_again_while_an_earlier_try_is_still_being_committed_stores_the_rest(
        self, engine: Engine, run: str
    ) -> None:
        """Two answers in a row are lost: the first try is stored, the second one is still at work in Postgres."""
        store(engine, run, 1, 1, 2)
        with engine.connect() as unheard:
            append_events(unheard, run, 1, 1, lines(1, 3))
            third = threading.Thread(target=store, args=(engine, run, 1, 1, 5))
            third.start()
            eventually(lambda: waiting_for_locks(engine) or not third.is_alive())
            unheard.commit()
        third.join(30)
        assert stored_lines(engine, run) == expected(5)

    def test_refuses_to_leave_a_gap(self, engine: Engine, run: str) -> None:
        with pytest.raises(RuntimeError, match="received event 3 of the attempt, but only 0 are stored"):
            store(engine, run, 1, 3, 1)

    def test_a_stale_worker_writes_nothing(self, engine: Engine, run: str) -> None:
        store(engine, run, 1, 1, 2)
        with engine.begin() as connection:
            connection.execute(machine.release(run, 1, "drain"))
        before = events_of(engine, run)
        with pytest.raises(LeaseFenced):
            store(engine, run, 1, 3, 1)
        assert events_of(engine, run) == before

    def test_an_ended_run_takes_no_more(self, engine: Engine, run: str) -> None:
        with engine.begin() as connection:
            connection.execute(machine.complete(run, 1, None, "done"))
        with pytest.raises(LeaseFenced):
            store(engine, run, 1, 1, 1)
        assert events_of(engine, run)[-1].type == "end"

    def test_a_new_attempt_counts_from_one_while_seq_goes_on(self, engine: Engine, run: str) -> None:
        store(engine, run, 1, 1, 2)
        with engine.begin() as connection:
            connection.execute(machine.release(run, 1, "drain"))
        worker = add_worker(engine)
        assert claim(engine, worker).attempt == 2
        store(engine, run, 3, 1, 1)
        assert stored_lines(engine, run) == ["line 1", "line 2", "line 1"]
        assert events_of(engine, run)[-1].attempt == 2

    def test_many_writers_who_doubt_their_commits_leave_no_gap_and_no_double(self, engine: Engine) -> None:
        """Trainer batches, resent at random, beside stop requests and status changes of the same run."""
        worker = add_worker(engine, devices=4)
        runs = [add_run(engine).id for _ in range(4)]
        for _ in runs:
            claim(engine, worker)

        def trainer(run_id: str, seed: int) -> None:
            dice = random.Random(seed)
            first = 1
            while first <= 200:
                count = dice.randint(1, 20)
                store(engine, run_id, 1, first, count)
                if dice.random() < 0.7:  # else: the answer got lost, the same is sent again, perhaps grown
                    first += count

        def others(run_id: str) -> None:
            for statement in (
                machine.begin(run_id, 1, 0, 0.0, 10, None),
                machine.begin_save(run_id, 1),
                machine.request_stop(run_id, "checkpoint"),
                machine.end_save(run_id, 1),
            ):
                with engine.begin() as connection:
                    connection.execute(statement)

        threads = [threading.Thread(target=trainer, args=(run_id, n)) for n, run_id in enumerate(runs)]
        threads += [threading.Thread(target=others, args=(run_id,)) for run_id in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for run_id in runs:
            lines_of_run = stored_lines(engine, run_id)
            assert lines_of_run == expected(len(lines_of_run))
            assert len(lines_of_run) >= 200


class TestWire:
    def test_a_payload_carries_run_seq_and_time(self) -> None:
        event = NewEvent.from_payload("metric", 1_700_000_000.25, {"step": 1, "loss": 0.5})
        assert log.event_json("run_x", 41, event.ts, event.data) == (
            '{"run_id":"run_x","seq":41,"ts":"2023-11-14T22:13:20.250Z","step":1,"loss":0.5}'
        )

    def test_a_payload_is_one_line_to_every_client(self) -> None:
        event = NewEvent.from_payload("log", 0.0, {"line": "a\u2028b\u2029c\x85d"})
        wire = log.event_json("run_x", 1, event.ts, event.data)
        assert wire.splitlines() == [wire]
        assert json.loads(wire)["line"] == "a\u2028b\u2029c\x85d"

    def test_an_empty_payload_is_still_an_object(self) -> None:
        event = NewEvent.from_payload("log", 0.0, {})
        assert log.event_json("run_x", 1, event.ts, event.data).endswith('"1970-01-01T00:00:00.000Z"}')
