"""The thread that makes second copies, beside what goes on: other workers, a database that is away, damage."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import async_sessionmaker

from app.config import Settings
from app.infra.db import async_engine
from app.infra.files.object_store import MARK, StoreUnavailable
from app.runs import deletion
from app.runs.checkpoints import replicas as statements
from app.runs.events.log import NewEvent
from tests.waiting import eventually
from tests.worker.attempts.test_job_builder import flip
from tests.worker.checkpoint_store.test_replication import (
    Worker,
    files_below,
    shared,  # noqa: F401
    worker,  # noqa: F401
)
from worker.checkpoint_store import remote_store as remotes
from worker.checkpoint_store import replicator as copying
from worker.checkpoint_store.remote_store import RemoteStore
from worker.checkpoint_store.replicator import Replicator

# ruff: noqa: F811


@pytest.fixture
def another(worker: Worker, shared: str) -> Replicator:
    """Another worker of the same storage."""
    return Replicator(RemoteStore(shared, worker.lab.storage), worker.lab.storage, worker.engine)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def said(worker: Worker) -> Iterator[list[str]]:
    """What the run is told meanwhile."""
    lines: list[str] = []

    def say(event: NewEvent) -> None:
        lines.append(json.loads(event.data)["line"])

    with worker.replicator.log_to(worker.lab.trainer.run_id, say):
        yield lines


def change(worker: Worker, statement: str) -> None:
    with worker.engine.begin() as connection:
        connection.execute(text(statement))


def while_it_is_sent(worker: Worker, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Have something happen when the first piece of the next checkpoint is on its way; it notes at each piece."""
    monkeypatch.setattr(copying, "_NOTE_SECONDS", -1.0)
    send = worker.replicator.remote.send
    left = [happens]

    def meanwhile(folder: Path, sha256: str, on_piece: Callable[[], None]) -> None:
        def on_each() -> None:
            if left:
                left.pop()()
            on_piece()

        send(folder, sha256, on_each)

    monkeypatch.setattr(worker.replicator.remote, "send", meanwhile)


class TestOnItsWay:
    def test_one_that_is_retired_is_sent_no_further_and_no_one_removes_it_under_the_sender(
        self, worker: Worker, another: Replicator, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Any] = []

        def let_go() -> None:
            change(worker, "UPDATE checkpoints SET deleted_at = now()")
            another.sweep()
            seen.append(worker.rows()[0].replica_started_at)

        while_it_is_sent(worker, monkeypatch, let_go)
        worker.save(10)
        assert worker.replicator._send(worker.rows()[0]) is False
        assert seen != [None], "the other worker did not say that nothing is there"
        assert files_below(place) == [] and worker.rows()[0].replica_started_at is None

    def test_nothing_is_left_of_a_run_that_is_deleted_meanwhile(
        self, worker: Worker, another: Replicator, place: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def delete() -> None:
            database = async_engine(settings.database_url or "")
            async with async_sessionmaker(database)() as session, session.begin():
                await deletion.delete_run(session, worker.lab.trainer.run_id)
            await database.dispose()

        def is_deleted() -> None:
            asyncio.run(delete())
            another.sweep()

        def left() -> Any:
            with worker.engine.connect() as connection:
                return connection.scalar(text("SELECT count(*) FROM replica_deletions"))

        while_it_is_sent(worker, monkeypatch, is_deleted)
        worker.save(10)
        worker.lab.trainer.complete()
        assert worker.replicator._send(worker.rows()[0]) is False
        assert files_below(place) == [] and left() == 1, "should the sender be killed, it is still known what to remove"
        change(worker, "UPDATE replica_deletions SET not_before = not_before - interval '10 min'")
        another.sweep()
        assert left() == 0

    def test_what_another_worker_has_gone_on_with_is_left_to_it(
        self, worker: Worker, another: Replicator, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stands_still() -> None:
            change(worker, "UPDATE checkpoints SET replica_started_at = now() - interval '1 h'")
            assert another._send(worker.rows()[0]) is True

        while_it_is_sent(worker, monkeypatch, stands_still)
        worker.save(10)
        assert worker.replicator._send(worker.rows()[0]) is False
        assert len(files_below(place)) == 2 and worker.rows()[0].replicated_at is not None

    def test_a_database_that_is_away_is_no_store_that_is(
        self, worker: Worker, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def goes_away() -> None:
            raise OperationalError("UPDATE checkpoints", {}, Exception("connection to server at 10.1.2.3 failed"))

        while_it_is_sent(worker, monkeypatch, goes_away)
        monkeypatch.setattr(worker.replicator, "_store_unavailable", pytest.fail)
        worker.save(10)
        worker.replicator.start()
        worker.until_copied(1)
        assert said == [] and worker.replicator._pause == 0


class TestDamage:
    def test_that_is_found_on_the_way_is_marked_reported_and_not_sent_again(
        self, worker: Worker, said: list[str], place: Path
    ) -> None:
        flip(worker.save(10))
        assert worker.replicator._send(worker.rows()[0]) is False
        (row,) = worker.rows()
        assert "other contents" in row.bad_reason and row.replica_started_at is None and files_below(place) == []
        (line,) = said
        assert row.id in line and "cannot be resumed from" in line and "other contents" in line

    def test_is_not_for_a_worker_to_report_whose_run_is_anothers_by_now(
        self, worker: Worker, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flip(worker.save(10))
        verify = copying.manifest.verify

        def slowly(*arguments: Any) -> list[str]:
            change(worker, "UPDATE runs SET lease_epoch = lease_epoch + 1")
            return verify(*arguments)

        monkeypatch.setattr(copying.manifest, "verify", slowly)
        worker.replicator._send(worker.rows()[0])
        assert worker.rows()[0].bad_reason is None and said == []

    def test_is_not_what_is_gone_or_cannot_be_read_just_now(
        self, worker: Worker, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = worker.save(10)
        worker.save(20)

        def fails(*_: Any) -> int:
            raise OSError(5, "input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(remotes, "open_below", fails)
            with pytest.raises(OSError, match="input/output"):
                worker.replicator._send(worker.rows()[1])
        folder.rename(folder.with_name("elsewhere"))
        assert worker.replicator._send(worker.rows()[0]) is False
        assert set(worker.lab.bad_reasons().values()) == {None} and said == []


class TestRounds:
    def test_what_cannot_be_removed_keeps_nothing_else(
        self, worker: Worker, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for step in (10, 20, 30):
            worker.save(step)
            worker.replicator._send(worker.rows()[-1])
        change(worker, "UPDATE checkpoints SET deleted_at = now()")
        monkeypatch.setattr(statements, "_AT_ONCE", 1)
        remove = worker.replicator.remote.remove

        def refuses(folder: Path) -> None:
            if folder.name == "checkpoint-10":
                raise StoreUnavailable("it refuses this worker")
            remove(folder)

        monkeypatch.setattr(worker.replicator.remote, "remove", refuses)
        worker.replicator.sweep()
        assert [row.replica_started_at is None for row in worker.rows()] == [False, True, True]
        assert [message for message in caplog.messages if "remain at" in message and "it refuses" in message]

    def test_what_only_a_lost_machine_has_hides_nothing(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        worker.lab.save(10)
        for step in (20, 30, 40):  # and no folder
            worker.lab.trainer.checkpoint(step)
        change(worker, "UPDATE checkpoints SET created_at = now() - interval '1 h'")
        monkeypatch.setattr(statements, "_AT_ONCE", 2)
        worker.replicator.queue_overdue()
        assert [one.name for one in worker.replicator._waiting.values()] == ["checkpoint-10"]

    def test_the_storage_itself_misses_no_checkpoint_however_old(self, worker: Worker, shared: str) -> None:
        worker.lab.save(10)
        worker.lab.trainer.complete()
        change(worker, "UPDATE checkpoints SET created_at = now() - interval '30 d'")
        change(worker, "UPDATE runs SET finished_at = now() - interval '30 d'")
        for is_storage, queued in ((False, []), (True, ["checkpoint-10"])):
            remote = RemoteStore(shared, worker.lab.storage)
            replicator = Replicator(remote, worker.lab.storage, worker.engine, is_storage=is_storage)
            replicator.queue_overdue()
            assert [one.name for one in replicator._waiting.values()] == queued


class TestATaleOfAbsence:
    def test_reaches_each_run_that_waits_and_its_end_is_reported_once_something_arrived(
        self, worker: Worker, said: list[str], place: Path
    ) -> None:
        place.rename(place.with_name("away"))
        flip(worker.save(10))
        worker.save(20)
        others: list[NewEvent] = []
        with worker.replicator.log_to("run_without_checkpoints", others.append):
            worker.replicator.start()
            eventually(lambda: len(said) == 1)
        assert "mount it" in said[0] and others == []
        place.with_name("away").rename(place)
        worker.until_copied(1)
        eventually(lambda: len(said) == 3)
        assert sorted(line.split()[0] for line in said[1:]) == ["Checkpoints", "checkpoint"]

    def test_is_not_over_because_something_was_released(self, worker: Worker, said: list[str], place: Path) -> None:
        place.rename(place.with_name("away"))
        worker.save(10)
        worker.replicator.start()
        eventually(lambda: len(said) == 1)
        change(worker, "UPDATE checkpoints SET deleted_at = now()")
        place.with_name("away").rename(place)
        eventually(lambda: not worker.replicator._waiting)
        worker.replicator.close()
        assert len(said) == 1


class TestAShare:
    def test_is_marked_by_the_first_worker_and_replaced_by_nothing_afterwards(
        self, worker: Worker, said: list[str], place: Path
    ) -> None:
        (place / MARK).unlink()
        worker.save(10)
        assert worker.replicator._send(worker.rows()[0]) is True
        assert (place / MARK).exists()
        place.rename(place.with_name("away"))
        place.mkdir()  # the place below which it is mounted
        worker.save(20)
        worker.replicator.start()
        eventually(lambda: len(said) == 1)
        assert f"no file {MARK}: mount" in said[0] and list(place.iterdir()) == []
        (place / MARK).touch()  # the operator means this one
        worker.until_copied(2)
