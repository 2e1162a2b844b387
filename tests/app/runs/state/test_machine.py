"""The state machine: who may move a run where, and what is told of it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, insert, text
from sqlalchemy.exc import IntegrityError

from app.config import Settings
from app.infra.db import sync_engine
from app.runs.queue.claim import claim_run
from app.runs.state import machine
from app.tables.runs import StoredEstimate
from tests.rows import add_run, add_worker, claim, events_of, run_row, waiting_for_locks
from tests.waiting import eventually


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    engine = sync_engine(settings.database_url or "", pool_size=10)
    yield engine
    engine.dispose()


def move(engine: Engine, statement):  # type: ignore[no-untyped-def]
    with engine.begin() as connection:
        return connection.execute(statement).mappings().all()


def reported(engine: Engine, run_id: str) -> list[tuple[str, str]]:
    """(type, what it says) of every event, after checking that seq is 1, 2, 3 …"""
    events = events_of(engine, run_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return [
        (event.type, event.data.get("to") or event.data.get("code") or event.data.get("status")) for event in events
    ]


class TestClaim:
    def test_takes_the_most_urgent_then_the_oldest_run(self, engine: Engine) -> None:
        old, urgent, young = add_run(engine), add_run(engine, priority=5), add_run(engine)
        worker = add_worker(engine, devices=3)
        assert [claim(engine, worker).id for _ in range(3)] == [urgent.id, old.id, young.id]
        assert claim(engine, worker) is None

    def test_raises_epoch_and_attempt_and_takes_a_device(self, engine: Engine) -> None:
        run, worker = add_run(engine), add_worker(engine)
        claimed = claim(engine, worker)
        assert (claimed.lease_epoch, claimed.attempt, claimed.status, claimed.lease_owner) == (
            1,
            1,
            "initializing",
            worker,
        )
        assert list(claimed.device_indexes) == [0]
        with engine.connect() as connection:
            device = connection.execute(text("SELECT run_id, lease_epoch FROM devices")).one()
            tries = connection.execute(text("SELECT attempt, outcome FROM run_attempts")).all()
        assert tuple(device) == (run.id, 1)
        assert [tuple(one) for one in tries] == [(1, None)]

    def test_gives_a_run_only_to_a_worker_with_enough_free_devices(self, engine: Engine) -> None:
        big, small = add_run(engine, devices_needed=2, priority=9), add_run(engine)
        narrow, roomy = add_worker(engine, devices=1), add_worker(engine, devices=2)
        assert claim(engine, narrow).id == small.id
        assert claim(engine, narrow) is None
        taken = claim(engine, roomy)
        assert taken.id == big.id
        assert sorted(taken.device_indexes) == [0, 1]

    def test_respects_backend_requirements_and_delay(self, engine: Engine) -> None:
        add_run(engine, backend="celery")
        add_run(engine, requirements={"kind": "cuda"})
        add_run(engine, requirements={"memory_mb": 2000})
        later = add_run(engine)
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE runs SET not_before = now() + interval '1 h' WHERE id = :id"), later._mapping
            )
        assert claim(engine, add_worker(engine)) is None

    def test_never_gives_one_run_to_two_of_many_claimants(self, engine: Engine) -> None:
        runs = {add_run(engine).id for _ in range(6)}
        workers = [add_worker(engine, devices=2) for _ in range(6)]
        got: list[str] = []

        def take(worker: str) -> None:
            while (claimed := claim(engine, worker)) is not None:
                got.append(claimed.id)

        threads = [threading.Thread(target=take, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(got) == sorted(runs)

    def test_needs_no_hint(self, engine: Engine) -> None:
        assert add_run(engine).notified_at is None
        assert claim(engine, add_worker(engine)) is not None

    def test_a_run_that_another_is_just_claiming_is_not_claimed_again(self, engine: Engine) -> None:
        run, (first_worker, second_worker) = add_run(engine), (add_worker(engine), add_worker(engine))
        with ThreadPoolExecutor(1) as thread:
            with engine.begin() as connection:
                row = claim_run(connection, first_worker, 60.0)
                assert row is not None and row.id == run.id
                second = thread.submit(claim, engine, second_worker)
                eventually(lambda: second.done() or waiting_for_locks(engine))
                assert not second.done(), "it waits for its turn"
            assert second.result(30) is None
        row = run_row(engine, run.id)
        assert (row.lease_owner, row.lease_epoch, row.attempt) == (first_worker, 1, 1)

    def test_a_run_that_another_transaction_is_just_changing_is_skipped(self, engine: Engine) -> None:
        first, second, worker = add_run(engine), add_run(engine), add_worker(engine)
        with ThreadPoolExecutor(1) as thread:
            with engine.begin() as connection:
                connection.execute(text("SELECT 1 FROM runs WHERE id = :id FOR UPDATE"), {"id": first.id})
                claimed = thread.submit(claim, engine, worker)
                eventually(lambda: claimed.done() or waiting_for_locks(engine))
                assert claimed.done(), "it waits for no one"
            assert claimed.result(30).id == second.id

    def test_a_run_to_which_something_is_just_being_added_is_not_skipped(self, engine: Engine) -> None:
        """An estimate is stored just when the worker has its hint, and the next hint is a second away."""
        run, worker = add_run(engine), add_worker(engine)
        with engine.begin() as storing:
            storing.execute(insert(StoredEstimate).values(run_id=run.id, estimate={}))
            row = claim(engine, worker)
        assert row is not None and row.id == run.id

    def test_a_second_thread_of_a_worker_sees_what_the_first_left(self, engine: Engine) -> None:
        for _ in range(2):
            add_run(engine)
        worker = add_worker(engine, devices=2)
        got: list[object] = []
        threads = [threading.Thread(target=lambda: got.append(claim(engine, worker))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert None not in got


class TestTheWholeLife:
    def test_is_reported_in_one_order(self, engine: Engine) -> None:
        run, worker = add_run(engine), add_worker(engine)
        claim(engine, worker)
        for statement in (
            machine.begin(run.id, 1, 0, 0.0, 10, None),
            machine.begin_save(run.id, 1),
            machine.end_save(run.id, 1),
            machine.complete(run.id, 1, 1, "training is complete"),
        ):
            assert len(move(engine, statement)) == 1
        assert reported(engine, run.id) == [
            ("status", "pending"),
            ("status", "initializing"),
            ("status", "running"),
            ("status", "checkpointing"),
            ("status", "running"),
            ("status", "completed"),
            ("end", "completed"),
        ]
        row = run_row(engine, run.id)
        assert row.finished_at is not None and row.lease_owner is None and row.output_attempt == 1

    def test_frees_devices_and_closes_the_attempt_at_its_end(self, engine: Engine) -> None:
        run, worker = add_run(engine), add_worker(engine)
        claim(engine, worker)
        move(engine, machine.fail(run.id, 1, "bad_data", "row 3 is empty"))
        assert reported(engine, run.id)[-3:] == [("error", "bad_data"), ("status", "failed"), ("end", "failed")]
        with engine.connect() as connection:
            assert connection.execute(text("SELECT run_id FROM devices")).scalar() is None
            assert connection.execute(text("SELECT outcome FROM run_attempts")).scalar() == "failed"

    @pytest.mark.parametrize("verb", ["begin", "complete", "fail", "release", "retry"])
    def test_a_stale_worker_moves_nothing(self, engine: Engine, verb: str) -> None:
        run, worker = add_run(engine), add_worker(engine)
        claim(engine, worker)
        move(engine, machine.release(run.id, 1, "drain"))
        claim(engine, worker)
        statement = {
            "begin": machine.begin(run.id, 1, 0, 0.0, 10, None),
            "complete": machine.complete(run.id, 1, 1, "done"),
            "fail": machine.fail(run.id, 1, "internal", "x"),
            "release": machine.release(run.id, 1, "x"),
            "retry": machine.retry(run.id, 1, "x", 0),
        }[verb]
        before = events_of(engine, run.id)
        assert move(engine, statement) == []
        assert events_of(engine, run.id) == before
        assert run_row(engine, run.id).status == "initializing"

    def test_a_stale_worker_renews_nothing_and_hears_no_stop(self, engine: Engine) -> None:
        run, worker = add_run(engine), add_worker(engine)
        claim(engine, worker)
        move(engine, machine.release(run.id, 1, "drain"))
        claim(engine, worker)
        before = run_row(engine, run.id).lease_expires_at
        assert move(engine, machine.renew(run.id, 1, 3600)) == []
        assert run_row(engine, run.id).lease_expires_at == before

    def test_an_impossible_row_is_refused_by_the_database(self, engine: Engine) -> None:
        run, worker = add_run(engine), add_worker(engine)
        claim(engine, worker)
        with pytest.raises(IntegrityError, match="cancelled_by_stop"):
            move(engine, machine.cancel(run.id, 1))


class TestStop:
    def test_ends_a_waiting_run_at_once(self, engine: Engine) -> None:
        run, worker = add_run(engine), add_worker(engine)
        (row,) = move(engine, machine.request_stop(run.id, "checkpoint"))
        assert row["status"] == "cancelled"
        assert reported(engine, run.id)[-2:] == [("status", "cancelled"), ("end", "cancelled")]
        assert claim(engine, worker) is None

    def test_marks_a_live_run_and_reaches_its_worker_with_the_renewal(self, engine: Engine) -> None:
        run, worker = add_run(engine), add_worker(engine)
        claim(engine, worker)
        (row,) = move(engine, machine.request_stop(run.id, "checkpoint"))
        assert row["status"] == "initializing"
        (renewed,) = move(engine, machine.renew(run.id, 1, 60))
        assert renewed["stop_mode"] == "checkpoint"
        assert renewed["stop_grace_seconds"] is None
        move(engine, machine.request_stop(run.id, "best", 90.0))
        (row,) = move(engine, machine.request_stop(run.id, "discard"))
        assert (row["stop_mode"], row["stop_grace_seconds"]) == ("discard", 90.0), "the last deadline counts"

    @pytest.mark.parametrize("verb", ["release", "retry", "reap_dead"])
    def test_is_never_followed_by_another_attempt(self, engine: Engine, verb: str) -> None:
        run, worker = add_run(engine), add_worker(engine)
        claim(engine, worker)
        move(engine, machine.request_stop(run.id, "checkpoint"))
        statement = {
            "release": machine.release(run.id, 1, "drain"),
            "retry": machine.retry(run.id, 1, "lost", 0),
            "reap_dead": machine.reap_dead([worker]),
        }[verb]
        (row,) = move(engine, statement)
        assert row["status"] == "cancelled"
        assert claim(engine, worker) is None

    def test_changes_nothing_once_the_run_has_ended(self, engine: Engine) -> None:
        run, worker = add_run(engine), add_worker(engine)
        claim(engine, worker)
        move(engine, machine.complete(run.id, 1, 1, "done"))
        assert move(engine, machine.request_stop(run.id, "checkpoint")) == []

    def test_against_a_claim_strands_no_run(self, engine: Engine) -> None:
        worker = add_worker(engine, devices=40)
        for _ in range(20):
            run = add_run(engine)
            both = [
                threading.Thread(target=lambda: claim(engine, worker)),
                threading.Thread(target=lambda id=run.id: move(engine, machine.request_stop(id, "checkpoint"))),
            ]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join(30)
            row = run_row(engine, run.id)
            assert row.stop_requested_at is not None
            assert row.status in ("cancelled", "initializing")


class TestLoss:
    def expire(self, engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("UPDATE runs SET lease_expires_at = clock_timestamp() - interval '1 s'"))

    def test_an_expired_lease_gives_the_run_back_with_a_new_fence(self, engine: Engine) -> None:
        run, worker = add_run(engine), add_worker(engine)
        claim(engine, worker, lease=0.05)
        self.expire(engine)
        (row,) = move(engine, machine.reap(0.01))
        assert (row["status"], row["lease_epoch"], row["lost_count"], row["from_status"]) == (
            "pending",
            2,
            1,
            "initializing",
        )
        assert move(engine, machine.renew(run.id, 1, 60)) == []
        assert move(engine, machine.reap(0.01)) == []

    def test_a_lease_that_expires_while_the_server_hangs_in_the_reapers_transaction_is_left_alone(
        self, engine: Engine
    ) -> None:
        """The worker's renewal waits for the same server and comes as soon as it moves again."""
        run = add_run(engine)
        with engine.begin() as reaping:
            reaping.execute(text("SELECT pg_try_advisory_xact_lock(1)"))
            claim(engine, add_worker(engine), lease=0.05)
            expired = text("SELECT lease_expires_at < clock_timestamp() FROM runs WHERE id = :id")
            eventually(lambda: reaping.scalar(expired, {"id": run.id}))
            assert reaping.execute(machine.reap(0.01)).all() == []
        assert len(move(engine, machine.reap(0.01))) == 1, "a later round takes it"

    def test_postgres_that_has_only_just_come_up_gives_a_lease_of_grace(self, engine: Engine) -> None:
        add_run(engine)
        claim(engine, add_worker(engine))
        self.expire(engine)
        assert move(engine, machine.reap(3600 * 24)) == []

    def test_a_run_that_is_lost_too_often_fails_and_says_so(self, engine: Engine) -> None:
        run, worker = add_run(engine, max_restarts=1), add_worker(engine)
        for _ in range(2):
            claim(engine, worker)
            move(engine, machine.reap_dead([worker]))
        row = run_row(engine, run.id)
        assert (row.status, row.error_code) == ("failed", "worker_lost")
        assert "max_restarts is 1" in row.error_message
        assert reported(engine, run.id)[-3:] == [("error", "worker_lost"), ("status", "failed"), ("end", "failed")]

    def test_being_released_is_no_loss(self, engine: Engine) -> None:
        run, worker = add_run(engine, max_restarts=0), add_worker(engine)
        for _ in range(3):
            claim(engine, worker)
            move(engine, machine.release(run.id, run_row(engine, run.id).lease_epoch, "drain"))
        row = run_row(engine, run.id)
        assert (row.status, row.lost_count, row.attempt) == ("pending", 0, 3)

    def test_each_further_loss_doubles_the_pause(self, engine: Engine) -> None:
        run, worker = add_run(engine), add_worker(engine)
        pauses = []
        for _ in range(3):
            with engine.begin() as connection:
                connection.execute(text("UPDATE runs SET not_before = now()"))
            claim(engine, worker)
            move(engine, machine.retry(run.id, run_row(engine, run.id).lease_epoch, "lost", 10))
            with engine.connect() as connection:
                pauses.append(connection.scalar(text("SELECT extract(epoch FROM not_before - now()) FROM runs")))
        assert [round(float(pause) / 10) for pause in pauses] == [1, 2, 4]

    def test_pauses_are_bounded_however_often_a_run_was_lost(self, engine: Engine) -> None:
        run, worker = add_run(engine, max_restarts=100), add_worker(engine)
        claim(engine, worker)
        with engine.begin() as connection:
            connection.execute(text("UPDATE runs SET lost_count = 90"))
        self.expire(engine)
        (row,) = move(engine, machine.reap(0.01))
        assert row["status"] == "pending"
        with engine.connect() as connection:
            pause = connection.scalar(text("SELECT extract(epoch FROM not_before - now()) FROM runs"))
        assert 0 < float(pause) < 120
        assert run_row(engine, run.id).lost_count == 91


class TestHints:
    def test_are_due_once_and_again_after_a_while(self, engine: Engine) -> None:
        run = add_run(engine)
        assert [row["id"] for row in move(engine, machine.mark_notified(10))] == [run.id]
        assert move(engine, machine.mark_notified(10)) == []
        with engine.begin() as connection:
            connection.execute(text("UPDATE runs SET notified_at = now() - interval '31 s'"))
        assert len(move(engine, machine.mark_notified(10))) == 1
