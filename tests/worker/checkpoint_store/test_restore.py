"""An attempt on a machine that lacks a checkpoint: what is fetched from the object store, and what if it is away."""

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update

from app.runs.events.log import NewEvent
from app.runs.state.checkpoints import retention, uploads
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run
from tests.factories import Trainer
from tests.rows import add_run, add_worker, run_row
from tests.worker.attempts.test_job_builder import CPU, WAITS, flip
from tests.worker.checkpoint_store.store_lab import StoreLab, lab, share  # noqa: F401
from worker.attempts import job_error
from worker.attempts.job_builder import prepare_job
from worker.attempts.job_error import JobError
from worker.checkpoint_files import manifest
from worker.checkpoint_store import restore
from worker.checkpoint_store.remote_store import TransferCancelled
from worker.checkpoint_store.restore import RestoreControl

# ruff: noqa: F811


@pytest.fixture
def moved(lab: StoreLab, tmp_path: Path) -> StoreLab:
    """A run of which everything is in the store, on a machine that has nothing of it."""
    lab.save_queued(10)
    lab.save_queued(20)
    lab.uploader.start()
    lab.wait_until_sent(2)
    lab.move(tmp_path / "the first machine")
    return lab


def test_attempt_resumes_from_checkpoint_saved_on_another_machine(lab: StoreLab, tmp_path: Path) -> None:
    """The first machine is gone with three checkpoints that it had not sent."""
    for step in (80, 90, 100):
        lab.save(step)
    lab.move(tmp_path / "the first machine")
    for start in (0, 10, 20):
        assert lab.next_attempt()[0].start.step == start
        lab.save(start + 10)
        with lab.engine.begin() as connection:
            retention.retire_checkpoints(connection, lab.trainer.run_id, 1)
    assert lab.bad_reasons()[100] is None


class TestTheNextAttempt:
    def test_machine_without_files_resumes_from_the_store(self, lab: StoreLab, tmp_path: Path) -> None:
        lab.save_queued(10)
        newest = lab.save_queued(20)
        written = (newest / "weights").read_bytes()
        lab.uploader.start()
        lab.wait_until_sent(2)
        lab.move(tmp_path / "the first machine")
        job, reported = lab.next_attempt()
        assert (reported["resume_from"]["path"], job.start.step) == (str(newest), 20)
        assert (newest / "weights").read_bytes() == written and "was fetched" in job.remarks[0]
        assert set(lab.bad_reasons().values()) == {None}

    def test_fetches_a_damaged_one_rather_than_take_an_older_checkpoint(self, lab: StoreLab) -> None:
        lab.save_queued(10)
        newest = lab.save_queued(20)
        lab.uploader.start()
        lab.wait_until_sent(2)
        flip(newest)
        job, _ = lab.next_attempt()
        assert job.start.step == 20 and "other contents" in job.remarks[0]
        assert manifest.verify(newest, lab.rows()[-1].manifest_sha256) == []
        assert set(lab.bad_reasons().values()) == {None}

    def test_takes_nothing_that_is_damaged_in_the_store(self, lab: StoreLab, share: Path, tmp_path: Path) -> None:
        lab.save_queued(10)
        lab.save_queued(20)
        lab.uploader.start()
        lab.wait_until_sent(2)
        flip(next(share.rglob("checkpoint-20")))
        lab.move(tmp_path / "the first machine")
        job, _ = lab.next_attempt()
        assert job.start.step == 10 and "it is corrupt in the storage" in job.remarks[0]

    def test_waits_for_a_store_that_is_away_rather_than_start_over(
        self, lab: StoreLab, share: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lab.save_queued(10)
        lab.uploader.start()
        lab.wait_until_sent(1)
        lab.move(tmp_path / "the first machine")
        weights = next(share.rglob("weights"))
        weights.rename(share / "away")
        weights.symlink_to(weights)  # the store answers with an error
        monkeypatch.setattr(restore, "_PAUSE_SECONDS", 0.0)
        with pytest.raises(JobError, match="cannot be fetched from") as refused:
            lab.next_attempt()
        assert refused.value.is_transient and lab.bad_reasons() == {10: None}
        (share / "away").rename(weights)
        assert lab.next_attempt()[0].start.step == 10

    def test_calls_what_was_never_sent_and_is_not_here_no_damage(self, lab: StoreLab, tmp_path: Path) -> None:
        lab.save_queued(10)
        lab.move(tmp_path / "the first machine")
        job, _ = lab.next_attempt()
        assert job.start.step == 0 and lab.bad_reasons() == {10: None}


class TestACorruptOneInTheStore:
    def test_corrupt_copy_in_the_store_is_sent_again_by_the_machine_that_has_the_checkpoint(
        self, moved: StoreLab, share: Path
    ) -> None:
        flip(next(share.rglob("checkpoint-20")))
        assert moved.next_attempt()[0].start.step == 10
        assert moved.bad_reasons() == {10: None, 20: None}
        assert [row.replicated_at is not None for row in moved.rows()] == [True, False]

    def test_is_read_again_because_wrong_bytes_may_have_arrived_of_what_is_intact(
        self, moved: StoreLab, share: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(restore, "_PAUSE_SECONDS", 0.0)
        replica = next(share.rglob("checkpoint-20"))
        intact = {path: path.read_bytes() for path in replica.iterdir()}
        flip(replica)

        def repair(_: NewEvent) -> None:
            for path, content in intact.items():
                path.write_bytes(content)

        assert moved.next_attempt(RestoreControl(lambda: False, repair))[0].start.step == 20
        assert [row.replicated_at is not None for row in moved.rows()] == [True, True]

    def test_checkpoint_damaged_here_and_in_the_store_is_given_up(self, lab: StoreLab, share: Path) -> None:
        flipped = lab.save_queued(10)
        lab.uploader.start()
        lab.wait_until_sent(1)
        flip(flipped)
        flip(next(share.rglob("checkpoint-10")))
        assert lab.next_attempt()[0].start.step == 0
        assert "it is corrupt in the storage" in (lab.bad_reasons()[10] or "")


class TestOnTheWay:
    def test_a_stop_ends_the_fetching_at_once_and_judges_nothing(self, moved: StoreLab) -> None:
        reported: list[NewEvent] = []
        with pytest.raises(TransferCancelled):
            moved.next_attempt(RestoreControl(lambda: bool(reported), reported.append))
        assert moved.bad_reasons() == {10: None, 20: None}
        assert not list(moved.storage.run_dir(moved.trainer.run_id).rglob("*checkpoint*"))

    def test_how_far_it_is_is_reported_but_not_for_each_piece(self, moved: StoreLab) -> None:
        reported: list[NewEvent] = []
        moved.next_attempt(RestoreControl(lambda: False, reported.append))
        (said,) = [json.loads(event.data) for event in reported]
        assert (said["phase"], said["total"]) == ("fetching", 10) and 0 <= said["done"] <= 10
        assert "checkpoint-20" in said["message"]

    def test_the_reserve_of_the_disk_stays_free(self, moved: StoreLab) -> None:
        moved.context.settings = moved.context.settings.model_copy(update={"disk_reserve_bytes": 2**60})
        with pytest.raises(OSError, match="ANNEAL_DISK_RESERVE_BYTES"):
            moved.next_attempt()
        assert moved.bad_reasons() == {10: None, 20: None}


class TestACheckpointThatIsAway:
    def test_is_waited_for_longer_each_time_and_counts_only_after_hours(
        self, moved: StoreLab, share: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (share / "runs").rename(share / "away")

        def pause() -> float | None:
            with pytest.raises(JobError) as refused:
                moved.next_attempt()
            assert refused.value.is_transient
            return refused.value.pause_seconds

        # The first attempt of this run never told that it began.
        assert [pause() for _ in range(2)] == [60.0, 90.0]
        monkeypatch.setattr(job_error, "_MAX_WAITS", 3)
        assert pause() is None


def test_half_fetched_files_of_a_dead_worker_are_removed_by_the_next_resume(lab: StoreLab, engine: Engine) -> None:
    whole = lab.save(10)
    parent = lab.trainer.complete()
    child = add_run(engine, parent_run_id=parent.run_id, resume_checkpoint_id=lab.ids[10])
    data: Any = run_row(engine, parent.run_id).dataset_id
    with engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == child.id).values(dataset_id=data))
    trainer = Trainer(engine, child.id)
    live, dead = add_worker(engine), "wrk_gone"
    halves = [lab.storage.fetch_dir(whole, f"{owner}.{child.id}") for owner in (live, dead)]
    for half in halves:
        half.mkdir()
    with lab.context.working_copy.used_by(child.id):
        assert prepare_job(lab.context, run_row(engine, trainer.run_id), CPU, WAITS).start.step == 10
    assert [half.is_dir() for half in halves] == [True, False] and whole.is_dir()


def test_the_row_of_one_that_has_been_sent_again_meanwhile_stays(moved: StoreLab) -> None:
    (row, _) = moved.rows()
    with moved.engine.begin() as connection:
        connection.execute(update(Checkpoint).where(Checkpoint.id == row.id).values(replicated_at=row.created_at))
        connection.execute(uploads.mark_corrupt(row.id, row.replicated_at))
    assert moved.rows()[0].replicated_at == row.created_at
