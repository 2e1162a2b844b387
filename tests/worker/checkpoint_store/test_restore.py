"""An attempt on a machine that lacks a checkpoint: what it does with the copy, with what is away, and with the disk."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update

from app.config import Settings
from app.runs.checkpoints import replicas, retention
from app.runs.events.log import NewEvent
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run
from tests.factories import Trainer
from tests.rows import add_run, add_worker, run_row
from tests.worker.attempts.test_job_builder import CPU, WAITS, flip
from tests.worker.checkpoint_store.test_replication import Worker
from worker.attempts import job_builder
from worker.attempts.job_builder import JobError, prepare
from worker.checkpoint_store import restore
from worker.checkpoint_store.remote_store import TransferCancelled
from worker.checkpoint_store.restore import RestoreControl


@pytest.fixture
def worker(settings: Settings, engine: Engine, tmp_path: Path) -> Iterator[Worker]:
    (tmp_path / "shared").mkdir()
    worker = Worker(settings, engine, f"file://{tmp_path}/shared")
    yield worker
    worker.replicator.close()


@pytest.fixture
def moved(worker: Worker, tmp_path: Path) -> Worker:
    """A run of which everything is copied, on a machine that has nothing of it."""
    worker.save(10)
    worker.save(20)
    worker.replicator.start()
    worker.until_copied(2)
    worker.moves(tmp_path / "the first machine")
    return worker


def test_what_an_attempt_saves_on_another_machine_is_what_the_next_one_there_goes_on_from(
    worker: Worker, tmp_path: Path
) -> None:
    """The first machine is gone with three checkpoints that nobody has copied."""
    for step in (80, 90, 100):
        worker.lab.save(step)
    worker.moves(tmp_path / "the first machine")
    for start in (0, 10, 20):
        assert worker.lab.next_attempt()[0].start_step == start
        worker.lab.save(start + 10)
        with worker.engine.begin() as connection:
            retention.retire(connection, worker.lab.trainer.run_id, 1)
    assert worker.lab.bad_reasons()[100] is None


class TestABadCopy:
    def test_of_what_another_machine_may_have_is_sent_again_by_that_one(self, moved: Worker, tmp_path: Path) -> None:
        flip(next((tmp_path / "shared").rglob("checkpoint-20")))
        assert moved.lab.next_attempt()[0].start_step == 10
        assert moved.lab.bad_reasons() == {10: None, 20: None}
        assert [row.replicated_at is not None for row in moved.rows()] == [True, False]

    def test_is_read_again_because_wrong_bytes_may_have_arrived_of_what_is_intact(
        self, moved: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(restore, "_PAUSE_SECONDS", 0.0)
        replica = next((tmp_path / "shared").rglob("checkpoint-20"))
        intact = {path: path.read_bytes() for path in replica.iterdir()}
        flip(replica)

        def repair(_: NewEvent) -> None:
            for path, content in intact.items():
                path.write_bytes(content)

        assert moved.lab.next_attempt(RestoreControl(lambda: False, repair))[0].start_step == 20
        assert [row.replicated_at is not None for row in moved.rows()] == [True, True]

    def test_of_what_is_damaged_here_too_is_the_end_of_it(self, worker: Worker, tmp_path: Path) -> None:
        flipped = worker.save(10)
        worker.replicator.start()
        worker.until_copied(1)
        flip(flipped)
        flip(next((tmp_path / "shared").rglob("checkpoint-10")))
        assert worker.lab.next_attempt()[0].start_step == 0
        assert "the replica is corrupt" in (worker.lab.bad_reasons()[10] or "")


class TestOnTheWay:
    def test_a_stop_ends_the_fetching_at_once_and_judges_nothing(self, moved: Worker) -> None:
        reported: list[NewEvent] = []
        with pytest.raises(TransferCancelled):
            moved.lab.next_attempt(RestoreControl(lambda: bool(reported), reported.append))
        assert moved.lab.bad_reasons() == {10: None, 20: None}
        assert not list(moved.lab.storage.run_dir(moved.lab.trainer.run_id).rglob("*checkpoint*"))

    def test_how_far_it_is_is_reported_but_not_for_each_piece(self, moved: Worker) -> None:
        reported: list[NewEvent] = []
        moved.lab.next_attempt(RestoreControl(lambda: False, reported.append))
        (said,) = [json.loads(event.data) for event in reported]
        assert (said["phase"], said["total"]) == ("fetching", 10) and 0 <= said["done"] <= 10
        assert "checkpoint-20" in said["message"]

    def test_the_reserve_of_the_disk_stays_free(self, moved: Worker) -> None:
        moved.lab.context.settings = moved.lab.context.settings.model_copy(update={"disk_reserve_bytes": 2**60})
        with pytest.raises(OSError, match="ANNEAL_DISK_RESERVE_BYTES"):
            moved.lab.next_attempt()
        assert moved.lab.bad_reasons() == {10: None, 20: None}


class TestAStoreThatIsAway:
    def test_is_waited_for_longer_each_time_and_counts_only_after_hours(
        self, moved: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "shared").rename(tmp_path / "away")
        monkeypatch.setattr(restore, "_PAUSE_SECONDS", 0.0)

        def pause() -> float | None:
            with pytest.raises(JobError) as refused:
                moved.lab.next_attempt()
            assert refused.value.is_transient
            return refused.value.pause_seconds

        # The first attempt of this run never told that it began.
        assert [pause() for _ in range(2)] == [60.0, 90.0]
        monkeypatch.setattr(job_builder, "_MAX_WAITS", 3)
        assert pause() is None


def test_what_a_dead_worker_fetched_by_half_for_a_run_goes_with_the_next_one_that_resumes_it(
    worker: Worker, engine: Engine
) -> None:
    whole = worker.lab.save(10)
    parent = worker.lab.trainer.complete()
    child = add_run(engine, parent_run_id=parent.run_id, resume_checkpoint_id=worker.lab.ids[10])
    data: Any = run_row(engine, parent.run_id).dataset_id
    with engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == child.id).values(dataset_id=data))
    trainer = Trainer(engine, child.id)
    live, dead = add_worker(engine), "wrk_gone"
    halves = [worker.lab.storage.fetch_dir(whole, f"{owner}.{child.id}") for owner in (live, dead)]
    for half in halves:
        half.mkdir()
    assert prepare(worker.lab.context, run_row(engine, trainer.run_id), CPU, WAITS).start_step == 10
    assert [half.is_dir() for half in halves] == [True, False] and whole.is_dir()


def test_the_row_of_a_copy_that_has_been_sent_again_meanwhile_stays(moved: Worker) -> None:
    (row, _) = moved.rows()
    with moved.engine.begin() as connection:
        connection.execute(update(Checkpoint).where(Checkpoint.id == row.id).values(replicated_at=row.created_at))
        connection.execute(replicas.mark_replica_corrupt(row.id, row.replicated_at))
    assert moved.rows()[0].replicated_at == row.created_at
