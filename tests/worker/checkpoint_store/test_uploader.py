"""The thread that sends checkpoints, beside what goes on: other workers, a database that is away, damage."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import async_sessionmaker

from app.infra.db import async_engine
from app.infra.files.object_store import StoreUnavailable
from app.infra.storage import Storage
from app.runs.events.log import NewEvent
from app.runs.state import deletion
from app.runs.state.checkpoints import retention
from app.runs.state.checkpoints import uploads as statements
from tests.waiting import eventually
from tests.worker.attempts.test_job_builder import flip
from tests.worker.checkpoint_store.store_lab import StoreLab, lab, share, stored_files  # noqa: F401
from worker.checkpoint_store import remote_store as remotes
from worker.checkpoint_store import uploader as uploading
from worker.checkpoint_store.uploader import CheckpointUploader

# ruff: noqa: F811


@pytest.fixture
def another(lab: StoreLab) -> CheckpointUploader:
    """That of another worker of the same machine."""
    return CheckpointUploader(lab.remote, lab.storage, lab.engine)


@pytest.fixture
def said(lab: StoreLab) -> Iterator[list[str]]:
    """What the run is told meanwhile."""
    lines: list[str] = []

    def say(event: NewEvent) -> None:
        lines.append(json.loads(event.data)["line"])

    with lab.uploader.log_to(lab.trainer.run_id, say):
        yield lines


def change(lab: StoreLab, statement: str) -> None:
    with lab.engine.begin() as connection:
        connection.execute(text(statement))


def while_it_is_sent(lab: StoreLab, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Have something happen when the first piece of the next checkpoint is on its way; it notes at each piece."""
    monkeypatch.setattr(uploading, "_NOTE_SECONDS", -1.0)
    send = lab.uploader.remote.send_checkpoint
    left = [happens]

    def meanwhile(folder: Path, sha256: str, on_piece: Callable[[], None]) -> None:
        def on_each() -> None:
            if left:
                left.pop()()
            on_piece()

        send(folder, sha256, on_each)

    monkeypatch.setattr(lab.uploader.remote, "send_checkpoint", meanwhile)


class TestOnItsWay:
    def test_retired_checkpoint_is_sent_no_further_and_removed_only_by_its_sender(
        self, lab: StoreLab, another: CheckpointUploader, share: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Any] = []

        def let_go() -> None:
            change(lab, "UPDATE checkpoints SET deleted_at = now()")
            another.remove_unneeded()
            seen.append(lab.rows()[0].replica_started_at)

        while_it_is_sent(lab, monkeypatch, let_go)
        lab.save_queued(10)
        assert lab.uploader._send_checkpoint(lab.rows()[0]) is False
        assert seen != [None], "the other worker did not say that nothing is there"
        assert stored_files(share) == [] and lab.rows()[0].replica_started_at is None

    def test_nothing_is_left_of_a_run_that_is_deleted_meanwhile(
        self, lab: StoreLab, another: CheckpointUploader, share: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def delete() -> None:
            database = async_engine(lab.context.settings.database_url or "")
            sessions = async_sessionmaker(database)
            async with sessions() as session, session.begin():
                await deletion.delete_runs(session, [lab.trainer.run_id])
            await deletion.delete_remaining_data(sessions, Storage.shared(lab.context.settings))
            await database.dispose()

        def planned_removals() -> Any:
            with lab.engine.connect() as connection:
                return connection.scalar(text("SELECT count(*) FROM replica_deletions"))

        def interrupt(_: Path) -> None:
            raise KeyboardInterrupt

        while_it_is_sent(lab, monkeypatch, lambda: asyncio.run(delete()))
        folder = lab.save_queued(10)
        lab.trainer.complete()
        assert lab.uploader._send_checkpoint(lab.rows()[0]) is False
        assert stored_files(share) == []
        another.remove_unneeded()
        assert planned_removals() == 1, "a worker that stood still meanwhile may send something yet"
        lab.remote.objects.put(f"{lab.storage.key_of(folder)}/weights", iter([b"w"]))
        change(lab, "UPDATE replica_deletions SET not_before = not_before - interval '10 min'")
        with monkeypatch.context() as patch:
            patch.setattr(another.remote, "remove_folder", interrupt)
            with pytest.raises(KeyboardInterrupt):
                another.remove_unneeded()
        assert stored_files(share) == ["weights"] and planned_removals() == 1
        another.remove_unneeded()
        assert stored_files(share) == [] and planned_removals() == 0

    def test_checkpoint_that_another_worker_sends_is_left_to_that_worker(
        self, lab: StoreLab, another: CheckpointUploader, share: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stands_still() -> None:
            change(lab, "UPDATE checkpoints SET replica_started_at = now() - interval '1 h'")
            assert another._send_checkpoint(lab.rows()[0]) is True

        while_it_is_sent(lab, monkeypatch, stands_still)
        lab.save_queued(10)
        assert lab.uploader._send_checkpoint(lab.rows()[0]) is False
        assert len(stored_files(share)) == 2 and lab.rows()[0].replicated_at is not None

    def test_a_database_that_is_away_is_no_store_that_is(
        self, lab: StoreLab, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def goes_away() -> None:
            raise OperationalError("UPDATE checkpoints", {}, Exception("connection to server at 10.1.2.3 failed"))

        while_it_is_sent(lab, monkeypatch, goes_away)
        monkeypatch.setattr(lab.uploader, "_store_unavailable", pytest.fail)
        lab.save_queued(10)
        lab.uploader.start()
        lab.wait_until_sent(1)
        assert said == [] and lab.uploader._pause == 0


class TestDamage:
    def test_that_is_found_on_the_way_is_marked_reported_and_not_sent_again(
        self, lab: StoreLab, said: list[str], share: Path
    ) -> None:
        flip(lab.save_queued(10))
        assert lab.uploader._send_checkpoint(lab.rows()[0]) is False
        (row,) = lab.rows()
        assert "other contents" in row.bad_reason and row.replica_started_at is None and stored_files(share) == []
        (line,) = said
        assert row.id in line and "cannot be resumed from" in line and "other contents" in line

    def test_is_not_for_a_worker_to_report_whose_run_is_anothers_by_now(
        self, lab: StoreLab, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flip(lab.save_queued(10))
        verify = uploading.manifest.verify

        def slowly(*arguments: Any) -> list[str]:
            change(lab, "UPDATE runs SET lease_epoch = lease_epoch + 1")
            return verify(*arguments)

        monkeypatch.setattr(uploading.manifest, "verify", slowly)
        lab.uploader._send_checkpoint(lab.rows()[0])
        assert lab.rows()[0].bad_reason is None and said == []

    def test_is_not_what_is_gone_or_cannot_be_read_just_now(
        self, lab: StoreLab, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = lab.save_queued(10)
        lab.save_queued(20)

        def fails(*_: Any) -> int:
            raise OSError(5, "input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(remotes, "open_below", fails)
            with pytest.raises(OSError, match="input/output"):
                lab.uploader._send_checkpoint(lab.rows()[1])
        folder.rename(folder.with_name("elsewhere"))
        assert lab.uploader._send_checkpoint(lab.rows()[0]) is False
        assert set(lab.bad_reasons().values()) == {None} and said == []


class TestRounds:
    def test_failed_removal_does_not_prevent_other_removals(
        self, lab: StoreLab, share: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for step in (10, 20, 30):
            lab.save_queued(step)
            lab.uploader._send_checkpoint(lab.rows()[-1])
        change(lab, "UPDATE checkpoints SET deleted_at = now()")
        monkeypatch.setattr(statements, "_AT_ONCE", 1)
        remove = lab.uploader.remote.remove_folder

        def refuses(folder: Path) -> None:
            if folder.name == "checkpoint-10":
                raise StoreUnavailable("it refuses this worker")
            remove(folder)

        monkeypatch.setattr(lab.uploader.remote, "remove_folder", refuses)
        lab.uploader.remove_unneeded()
        assert [row.replica_started_at is None for row in lab.rows()] == [False, True, True]
        assert [message for message in caplog.messages if "remain at" in message and "it refuses" in message]

    def test_checkpoint_only_on_a_lost_machine_hides_no_other(
        self, lab: StoreLab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lab.save(10)
        for step in (20, 30, 40):  # and no folder
            lab.trainer.checkpoint(step)
        change(lab, "UPDATE checkpoints SET created_at = now() - interval '1 h'")
        monkeypatch.setattr(statements, "_AT_ONCE", 2)
        lab.uploader.queue_overdue()
        assert [one.name for one in lab.uploader._waiting.values()] == ["checkpoint-10"]

    def test_no_checkpoint_is_missed_however_old(self, lab: StoreLab) -> None:
        lab.save(10)
        lab.trainer.complete()
        change(lab, "UPDATE checkpoints SET created_at = now() - interval '30 d'")
        change(lab, "UPDATE runs SET finished_at = now() - interval '30 d'")
        lab.uploader.queue_overdue()
        assert [one.name for one in lab.uploader._waiting.values()] == ["checkpoint-10"]


class TestATaleOfAbsence:
    def test_reaches_each_run_that_waits_and_its_end_is_reported_once_something_arrived(
        self, lab: StoreLab, said: list[str], share: Path
    ) -> None:
        share.rename(share.with_name("away"))
        flip(lab.save_queued(10))
        lab.save_queued(20)
        others: list[NewEvent] = []
        with lab.uploader.log_to("run_without_checkpoints", others.append):
            lab.uploader.start()
            eventually(lambda: len(said) == 1)
        assert "mount it" in said[0] and others == []
        share.with_name("away").rename(share)
        lab.wait_until_sent(1)
        eventually(lambda: len(said) == 3)
        assert sorted(line.split()[0] for line in said[1:]) == ["Checkpoints", "checkpoint"]

    def test_is_not_over_because_something_was_released(self, lab: StoreLab, said: list[str], share: Path) -> None:
        share.rename(share.with_name("away"))
        lab.save_queued(10)
        lab.uploader.start()
        eventually(lambda: len(said) == 1)
        change(lab, "UPDATE checkpoints SET deleted_at = now()")
        share.with_name("away").rename(share)
        eventually(lambda: not lab.uploader._waiting)
        lab.uploader.close()
        assert len(said) == 1


class TestTheThread:
    def test_a_store_that_is_away_is_reported_once_and_waited_for(self, lab: StoreLab, share: Path) -> None:
        share.rename(share.with_name("away"))
        said: list[NewEvent] = []
        with lab.uploader.log_to(lab.trainer.run_id, said.append):
            lab.save_queued(10)
            lab.uploader.start()
            eventually(lambda: lab.uploader._pause > 1, what="a second try")
            lab.save_queued(20)
            share.with_name("away").rename(share)
            lab.wait_until_sent(2)
            eventually(lambda: len(said) > 1)
        lines = [json.loads(event.data)["line"] for event in said]
        assert len(lines) == 2 and "mount it" in lines[0] and "again" in lines[1]

    def test_checkpoints_not_sent_by_a_killed_worker_are_sent(self, lab: StoreLab) -> None:
        lab.save(10)  # and nobody was told of it
        with lab.engine.begin() as connection:
            connection.execute(
                text(
                    "UPDATE checkpoints SET created_at = now() - interval '1 h', "
                    "replica_started_at = now() - interval '1 h'"
                )
            )
        lab.uploader.start()
        lab.wait_until_sent(1)

    def test_what_retention_removes_is_removed_from_the_store(self, lab: StoreLab, share: Path) -> None:
        for step in (10, 20, 30):
            lab.save_queued(step)
        lab.uploader.start()
        lab.wait_until_sent(3)
        with lab.engine.begin() as connection:
            retention.retire_checkpoints(connection, lab.trainer.run_id, 1)
        lab.uploader.schedule_sweep()
        # What is being removed cannot be walked through.
        eventually(lambda: [row.replica_started_at is None for row in lab.rows()] == [True, True, False])
        assert [path.name for path in share.rglob("checkpoint-*")] == ["checkpoint-30"]

    def test_checkpoint_retired_during_upload_leaves_nothing_in_the_store(
        self, lab: StoreLab, share: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send = lab.uploader.remote.send_checkpoint

        def slowly(*arguments: Any) -> None:
            send(*arguments)
            with lab.engine.begin() as connection:
                connection.execute(text("UPDATE checkpoints SET deleted_at = now()"))

        monkeypatch.setattr(lab.uploader.remote, "send_checkpoint", slowly)
        lab.save_queued(10)
        lab.uploader.start()
        eventually(lambda: lab.rows()[0].deleted_at and lab.rows()[0].replica_started_at is None)
        assert stored_files(share) == []


class TestTheEndOfARun:
    LEASE = {"fenced": False, "expired": False}

    def settled(self, lab: StoreLab, seconds: float) -> list[dict[str, Any]]:
        """What the run is told while it waits for its checkpoints to be sent, at most so long."""
        reported: list[NewEvent] = []
        lease: Any = SimpleNamespace(run_id=lab.trainer.run_id, **self.LEASE)
        lab.uploader.wait_until_sent(
            lease.run_id, lambda: lease.fenced or lease.expired, reported.append, time.monotonic() + seconds
        )
        return [json.loads(event.data) for event in reported]

    def test_waits_until_all_are_sent(self, lab: StoreLab) -> None:
        lab.save_queued(10)
        lab.uploader.start()
        assert [one.get("phase", "nothing was left") for one in self.settled(lab, math.inf)] in ([], ["copying"])
        assert lab.rows()[0].replicated_at is not None

    def test_names_what_has_none_when_the_time_is_over(self, lab: StoreLab) -> None:
        lab.save_queued(10)  # and nobody sends it
        waiting, left = self.settled(lab, 0.3)
        assert "sending checkpoint-10" in waiting["message"] and "does not have checkpoint-10 yet" in left["line"]

    def test_does_not_wait_for_a_store_that_is_away(self, lab: StoreLab, share: Path) -> None:
        share.rename(share.with_name("away"))
        lab.save_queued(10)
        lab.uploader.start()
        assert "does not have checkpoint-10 yet" in self.settled(lab, math.inf)[-1]["line"]
