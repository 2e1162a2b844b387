"""What follows from an output that is sent to an object store, or cannot be."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, update

from anneal.contracts.stop import StopRequest
from app.config import Settings
from app.infra.files.object_store import MARK, ObjectStore, StoreUnavailable
from app.infra.storage import Storage
from app.runs.state import machine
from app.tables.events import RunEvent
from app.tables.runs import Attempt, Run
from tests.rows import add_run, add_worker, claim
from worker.attempts.delivery import Delivery
from worker.checkpoint_store.remote_store import RemoteStore


class Lab:
    """An attempt that has written an output and one record, and its worker."""

    def __init__(self, settings: Settings, engine: Engine, share: Path) -> None:
        self.engine, self.share = engine, share
        add_run(engine, max_restarts=1)
        self.run = claim(engine, add_worker(engine))
        url = f"file://{share}"
        storage = Storage(Settings(**{**settings.model_dump(), "storage": url}))
        (storage.output_dir(self.run.id, 1) / "deep").mkdir(parents=True)
        (storage.output_dir(self.run.id, 1) / "deep" / "weights").write_bytes(b"w" * 1000)
        (storage.attempt_dir(self.run.id, 1) / "metrics.jsonl").write_text("{}\n")
        self.said: list[Any] = []
        self.lease: Any = SimpleNamespace(fenced=False, expired=True, stop=None, preempted_for=None)
        self.writer: Any = SimpleNamespace(
            enqueue_item=self.said.append, retry_during_outage=lambda work: work(), wait_past_lease=lambda: None
        )
        self.context: Any = SimpleNamespace(
            working_copy=SimpleNamespace(remote=RemoteStore(url, storage)), storage=storage, engine=engine,
            drained_at=float("inf"), settings=SimpleNamespace(save_grace_seconds=0.3, delivery_seconds=0.3),
            health=SimpleNamespace(record_failed_start=lambda _: None),
        )  # fmt: skip

    def ends(self, *, has_output: bool = True) -> Any:
        """Deliver, and store what follows; answers the run's row."""
        done = machine.complete(self.run.id, self.run.lease_epoch, 1, "done")
        remote = self.context.working_copy.remote
        delivery = Delivery(self.context, remote, self.run, self.lease, self.writer)
        ending = delivery.deliver(done, has_output=has_output)
        with self.engine.begin() as connection:
            connection.execute(ending)
            return connection.execute(select(Run.__table__).where(Run.id == self.run.id)).one()

    def stored(self) -> list[str]:
        return sorted(path.name for path in self.share.rglob("*") if path.is_file() and path.name != MARK)

    def hashes(self) -> tuple[str | None, str | None]:
        with self.engine.connect() as connection:
            row = connection.execute(select(Attempt.output_sha256, Attempt.records_sha256)).one()
        return row.output_sha256, row.records_sha256


@pytest.fixture
def lab(settings: Settings, engine: Engine, tmp_path: Path) -> Lab:
    share = tmp_path / "share"
    share.mkdir()
    (share / MARK).touch()
    return Lab(settings, engine, share)


def test_a_run_is_completed_once_its_output_and_records_are_stored_also_past_its_lease(lab: Lab) -> None:
    assert lab.ends().status == "completed"
    assert lab.stored() == ["metrics.jsonl", "output.manifest.json", "records.manifest.json", "weights"]
    assert all(lab.hashes())


def test_without_the_store_it_is_requeued_after_a_time_and_nothing_says_that_it_is_stored(lab: Lab) -> None:
    lab.share.rename(lab.share.with_name("away"))
    began = time.monotonic()
    row = lab.ends()
    assert (row.status, row.lost_count) == ("pending", 0) and time.monotonic() - began > 0.3
    assert lab.hashes() == (None, None)
    reason = reason_of(lab)
    assert "could not be sent" in reason and "last checkpoint" in reason


def test_an_output_is_kept_and_sent_once_the_store_is_back(lab: Lab) -> None:
    lab.context.settings.delivery_seconds, lab.context.settings.save_grace_seconds = 60.0, 0.0
    away = lab.share.with_name("away")
    lab.share.rename(away)

    def say(event: Any) -> None:
        lab.said.append(event)
        if "does not take the output" in str(event):
            away.rename(lab.share)

    lab.writer.enqueue_item = say
    assert lab.ends().status == "completed"
    assert [text for text in ("keeps the output and the device", "next try in 1 s, for another 60 s", "was sent")
            if not any(text in str(event) for event in lab.said)] == []  # fmt: skip


class Down:
    """A store that is down; its client buffers the content of a file first, as that of S3 does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, only: str = "") -> None:
        self.puts, put = 0, ObjectStore.put

        def refuses(store: ObjectStore, key: str, pieces: Iterator[bytes], **options: Any) -> None:
            if only not in key:
                return put(store, key, pieces, **options)
            b"".join(pieces)
            self.puts += 1
            assert self.puts < 4, "it never gives up"
            raise StoreUnavailable("it does not answer", is_silent=True)

        monkeypatch.setattr(ObjectStore, "put", refuses)


def test_a_store_whose_client_buffers_is_given_up_too(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    down = Down(monkeypatch)
    row = lab.ends()
    assert (row.status, row.lost_count, down.puts) == ("pending", 0, 2)


def test_the_time_for_the_output_begins_after_the_wait_for_the_uploads(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.context.settings.delivery_seconds = 60.0
    lab.share.rename(lab.share.with_name("away"))
    monotonic, waited = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + waited[0])

    def say(event: Any) -> None:
        lab.said.append(event)
        if "next try" in str(event):
            lab.lease.stop = StopRequest("checkpoint")

    lab.writer.enqueue_item, lab.writer.drain, lab.lease.run_id = say, lambda: None, lab.run.id
    delivery = Delivery(lab.context, lab.context.working_copy.remote, lab.run, lab.lease, lab.writer)
    uploader: Any = SimpleNamespace(wait_until_sent=lambda *_: waited.__setitem__(0, 100.0))
    delivery.wait_for_uploads(uploader)
    delivery.deliver(machine.complete(lab.run.id, lab.run.lease_epoch, 1, "done"), has_output=True)
    assert any("for another 60 s" in str(event) for event in lab.said)


def test_a_stop_ends_the_tries(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    down = Down(monkeypatch)
    lab.context.settings.delivery_seconds = 60.0
    lab.lease.stop = StopRequest("checkpoint")
    with lab.engine.begin() as connection:
        connection.execute(update(Run).values(stop_mode="checkpoint", stop_requested_at=func.now()))
    assert (lab.ends().status, down.puts) == ("cancelled", 1)


def test_records_that_cannot_be_sent_do_not_keep_a_run_from_being_completed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    Down(monkeypatch, only="records.manifest.json")
    assert lab.ends().status == "completed"
    output, records = lab.hashes()
    assert output and records is None and "could not be sent" in str(lab.said[-1])


def test_records_are_sent_for_the_grace_period_only_and_not_if_the_work_is_discarded(lab: Lab) -> None:
    lab.lease.stop = StopRequest("discard")
    lab.ends(has_output=False)
    assert lab.stored() == [] and lab.said == []
    lab.lease.stop = StopRequest("checkpoint")
    lab.context.settings.save_grace_seconds = 0.0
    lab.ends(has_output=False)
    assert lab.stored() == [] and "longer than the grace period" in str(lab.said[-1])


def test_a_worker_that_has_lost_the_run_records_nothing(lab: Lab) -> None:
    with lab.engine.begin() as connection:
        connection.execute(machine.retry(lab.run.id, lab.run.lease_epoch, "lost", 0.0))
        connection.execute(update(Run).values(lease_epoch=lab.run.lease_epoch + 1))
    lab.ends()
    assert lab.hashes() == (None, None)


def test_a_drain_waits_for_the_grace_period_and_then_releases_it(lab: Lab) -> None:
    lab.share.rename(lab.share.with_name("away"))
    lab.context.settings.save_grace_seconds = lab.context.settings.delivery_seconds = 60.0
    lab.context.drained_at = time.monotonic() - 59.8
    row = lab.ends()
    assert (row.status, row.lost_count) == ("pending", 0)


def test_a_run_that_is_asked_to_make_room_does_so_after_the_grace_period(lab: Lab) -> None:
    lab.share.rename(lab.share.with_name("away"))
    lab.context.settings.delivery_seconds = 60.0
    lab.lease.preempted_for = "run_urgent"
    row = lab.ends()
    assert (row.status, row.lost_count) == ("pending", 0)
    assert "preempted for run run_urgent" in reason_of(lab)


def test_a_store_that_answers_and_refuses_cannot_make_a_run_loop(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt would start, train, and wait again."""

    def full(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("it has no space left")

    monkeypatch.setattr(ObjectStore, "put", full)
    row = lab.ends()
    assert (row.status, row.lost_count) == ("pending", 1)
    assert "no space left" in reason_of(lab)


def reason_of(lab: Lab) -> str:
    """The reason of the last transition to `pending`."""
    data = RunEvent.data
    with lab.engine.connect() as connection:
        changes = connection.scalars(select(data).where(RunEvent.type == "status").order_by(RunEvent.seq)).all()
    return str([one for one in changes if one["to"] == "pending"][-1]["reason"])  # type: ignore[index]


def test_output_of_a_run_owned_by_another_worker_is_not_sent(lab: Lab) -> None:
    lab.lease.fenced = True
    with lab.engine.begin() as connection:
        connection.execute(machine.retry(lab.run.id, lab.run.lease_epoch, "lost", 0.0))
    assert lab.ends().status == "pending"
    assert lab.stored() == [] and lab.hashes() == (None, None)


def test_an_output_that_is_no_folder_is_not_taken_for_one(lab: Lab, tmp_path: Path) -> None:
    output = lab.context.storage.output_dir(lab.run.id, 1)
    output.rename(tmp_path / "outside")
    output.symlink_to(tmp_path / "outside")
    assert lab.ends().status == "pending"
    assert lab.stored() == []


def test_records_of_an_attempt_without_output_are_sent_once_and_their_loss_is_reported(lab: Lab) -> None:
    lab.ends(has_output=False)
    assert lab.stored() == ["metrics.jsonl", "records.manifest.json"]
    lab.share.rename(lab.share.with_name("away"))
    lab.ends(has_output=False)
    assert "records of this attempt could not be sent" in str(lab.said[-1])


@pytest.mark.parametrize(
    ("stop", "waits"),
    [(None, True), (StopRequest("checkpoint"), True), (StopRequest("best"), True),
     (StopRequest("discard"), False)],
)  # fmt: skip
def test_uploads_are_waited_for_where_what_was_saved_is_wanted(stop: StopRequest | None, waits: bool) -> None:
    calls: list[str] = []
    nothing: Any = None
    context: Any = SimpleNamespace(drained_at=float("inf"), settings=SimpleNamespace(save_grace_seconds=1.0))
    lease: Any = SimpleNamespace(run_id="run_1", stop=stop)
    writer: Any = SimpleNamespace(enqueue_item=lambda _: None, drain=lambda: calls.append("drain"))
    uploader: Any = SimpleNamespace(wait_until_sent=lambda *_: calls.append("settle"))
    Delivery(context, nothing, nothing, lease, writer).wait_for_uploads(uploader)
    assert calls == (["drain", "settle"] if waits else [])
