"""Second copies of checkpoints: made whole or not at all, fetched as they were written, gone with what they are of."""

import hashlib
import json
import os
import pwd
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.ext.asyncio import async_sessionmaker

from app.config import Settings
from app.infra.db import async_engine
from app.infra.errors import SetupError
from app.infra.files import file_manifest
from app.infra.files.object_store import MARK, StoreUnavailable
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.runs import deletion
from app.runs.checkpoints import retention
from app.runs.events.log import NewEvent
from app.tables.checkpoints import Checkpoint
from tests.object_store import s3
from tests.rows import run_row
from tests.waiting import eventually
from tests.worker.attempts.test_job_builder import CPU, WAITS, Lab, flip
from worker.attempts.job_builder import JobError, prepare
from worker.checkpoint_files import manifest
from worker.checkpoint_store import restore
from worker.checkpoint_store.remote_store import (
    LocalCheckpointCorrupt,
    RemoteStore,
    ReplicaCorrupt,
    ReplicaMissing,
)
from worker.checkpoint_store.replicator import Replicator

__all__ = ["s3"]


@pytest.fixture
def shared(tmp_path: Path) -> str:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / MARK).touch()
    return f"file://{tmp_path}/shared"


class Worker:
    """The first attempt of a run, and copies of its checkpoints."""

    def __init__(self, settings: Settings, engine: Engine, url: str) -> None:
        self.lab = Lab(settings, engine)
        self.engine = engine
        self.replicator = self.lab.context.replicator = Replicator(
            RemoteStore(url, self.lab.storage), self.lab.storage, engine
        )

    def save(self, step: int) -> Path:
        folder = self.lab.save(step)
        (row,) = [row for row in self.rows() if row.step == step]
        self.replicator.add(row)
        return folder

    def rows(self) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(select(Checkpoint.__table__).order_by(Checkpoint.step)).all())

    def until_copied(self, count: int) -> None:
        eventually(lambda: sum(row.replicated_at is not None for row in self.rows()) == count)

    def moves(self, path: Path) -> None:
        """The next attempt is on a machine that has nothing of this run."""
        (self.lab.storage.root / "runs").rename(path)


@pytest.fixture
def worker(settings: Settings, engine: Engine, shared: str) -> Iterator[Worker]:
    worker = Worker(settings, engine, shared)
    yield worker
    worker.replicator.close()


def files_below(folder: Path) -> list[str]:
    """All but the mark of a second storage."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MARK)


class TestAStore:
    @pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.full)])
    def remote(self, request: pytest.FixtureRequest, settings: Settings, shared: str) -> RemoteStore:
        kind = request.param
        url = (
            request.getfixturevalue("s3") if kind == "s3" else shared if kind == "file" else f"memory://{new_id('run')}"
        )
        return RemoteStore(url, Storage(settings))

    def test_gives_back_every_byte_and_forgets_what_is_removed(self, remote: RemoteStore, settings: Settings) -> None:
        folder, digest = whole(settings)
        written = {name: (folder / name).read_bytes() for name in files_below(folder)}
        assert "deeper/weights" in written
        remote.send(folder, digest, lambda: None)
        folder.rename(folder.with_name("elsewhere"))
        remote.fetch(folder, digest, "wrk_test", lambda: None)
        assert {name: (folder / name).read_bytes() for name in files_below(folder)} == written
        assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoint-5", "elsewhere"]
        remote.remove(folder)
        with pytest.raises(ReplicaMissing):
            remote.fetch(folder, digest, "wrk_test", lambda: None)
        remote.remove(folder)

    def test_a_kill_between_any_two_files_leaves_nothing_that_is_taken_for_a_copy(
        self, remote: RemoteStore, settings: Settings
    ) -> None:
        folder, digest = whole(settings)
        pieces: list[int] = []
        remote.send(folder, digest, lambda: pieces.append(1))
        remote.remove(folder)
        for last in range(len(pieces)):
            with pytest.raises(KeyboardInterrupt):
                remote.send(folder, digest, killed_after(last))
            with pytest.raises(ReplicaMissing):
                remote.fetch(folder, digest, "wrk_test", lambda: None)
            assert manifest.verify(folder, digest) == [], "what is here stays as it is"


def whole(settings: Settings) -> tuple[Path, str]:
    """A checkpoint of several files; answers its folder and the hash of its manifest."""
    folder = Storage(settings).checkpoint_dir(new_id("run"), 1, 5)
    staging = folder.with_name(".staging")
    (staging / "deeper").mkdir(parents=True)
    (staging / "deeper" / "weights").write_bytes(os.urandom(9 * 2**20))
    (staging / "empty").touch()
    (staging / "state.json").write_text("{}")
    digest = manifest.write_manifest(staging, 5, {})
    manifest.commit(staging, folder)
    return folder, digest


def killed_after(pieces: int) -> Callable[[], None]:
    left = [pieces]

    def on_piece() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    return on_piece


class TestWhatATrainerMayWrite:
    """Its folder is its own: the worker, which sends what is there, is not to be led elsewhere by it."""

    def test_no_link_and_no_damage_is_sent(self, settings: Settings, shared: str) -> None:
        folder, digest = whole(settings)
        (folder / "state.json").unlink()
        (folder / "state.json").symlink_to("/etc/passwd")
        with pytest.raises(LocalCheckpointCorrupt):
            RemoteStore(shared, Storage(settings)).send(folder, digest, lambda: None)
        folder, digest = whole(settings)
        (folder / "state.json").write_text("[]")
        with pytest.raises(LocalCheckpointCorrupt, match="other contents"):
            RemoteStore(shared, Storage(settings)).send(folder, digest, lambda: None)

    @pytest.mark.parametrize("name", ["../../outside", "/outside", "a/../../../outside"])
    def test_no_name_in_a_manifest_leaves_the_folder(
        self, name: str, settings: Settings, shared: str, tmp_path: Path
    ) -> None:
        folder, _ = whole(settings)
        listed = {"format": 1, "step": 5, "files": {name: {"bytes": 1, "sha256": "0" * 64}}}
        said = json.dumps(listed).encode()
        (folder / file_manifest.MANIFEST).write_bytes(said)
        digest = hashlib.sha256(said).hexdigest()
        remote = RemoteStore(shared, Storage(settings))
        with pytest.raises(LocalCheckpointCorrupt):
            remote.send(folder, digest, lambda: None)
        place = tmp_path / "shared" / Storage(settings).key_of(folder)
        place.mkdir(parents=True)
        (place / file_manifest.MANIFEST).write_bytes(said)
        with pytest.raises(ReplicaCorrupt):
            remote.fetch(folder, digest, "wrk_test", lambda: None)
        assert files_below(tmp_path / "shared") == [
            f"{place.relative_to(tmp_path / 'shared')}/{file_manifest.MANIFEST}"
        ]

    def test_no_link_in_its_folder_leads_the_worker_elsewhere(
        self, settings: Settings, shared: str, tmp_path: Path
    ) -> None:
        """The trainer's user owns the folder around the checkpoint, and replaces what is there while it is fetched."""
        folder, digest = whole(settings)
        remote = RemoteStore(shared, Storage(settings))
        remote.send(folder, digest, lambda: None)
        user = pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
        os.chown(folder.parent, user.pw_uid, user.pw_gid)
        outside = tmp_path / "outside"
        outside.mkdir()
        outside.chmod(0o777)
        swapped = []
        attempt = os.open(folder.parent, os.O_RDONLY)

        def attack() -> None:
            """Only what that user may do: it renames what it finds and leaves links in its place."""
            uid = os.geteuid()
            os.seteuid(user.pw_uid)
            try:
                for name in {*os.listdir(attempt), folder.name}:  # noqa: PTH208
                    if not name.startswith("moved"):
                        with suppress(FileNotFoundError):
                            os.rename(name, f"moved-{len(swapped)}", src_dir_fd=attempt, dst_dir_fd=attempt)
                        os.symlink(outside, name, dir_fd=attempt)
                        swapped.append(name)
            finally:
                os.seteuid(uid)

        try:
            attack()
            remote.fetch(folder, digest, "wrk_test", attack)
        finally:
            os.close(attempt)
        assert swapped and list(outside.iterdir()) == []
        assert not folder.is_symlink() and manifest.verify(folder, digest) == []
        assert sorted(path.name for path in folder.parent.parent.iterdir()) == ["a1"], "nothing half fetched is left"

    def test_a_manifest_that_names_a_file_twice_is_of_a_corrupt_replica(self, settings: Settings) -> None:
        folder, _ = whole(settings)
        said = json.dumps({"files": {file_manifest.MANIFEST: {"bytes": 9, "sha256": "0" * 64}}}).encode()
        remote = RemoteStore(f"memory://{new_id('run')}", Storage(settings))
        remote.objects.put(f"{Storage(settings).key_of(folder)}/{file_manifest.MANIFEST}", iter([said]))
        with pytest.raises(ReplicaCorrupt, match="twice"):
            remote.fetch(folder, hashlib.sha256(said).hexdigest(), "wrk_test", lambda: None)


class TestTheNextAttempt:
    def test_where_nothing_is_goes_on_from_the_copy(self, worker: Worker, tmp_path: Path) -> None:
        worker.save(10)
        newest = worker.save(20)
        written = (newest / "weights").read_bytes()
        worker.replicator.start()
        worker.until_copied(2)
        worker.moves(tmp_path / "the first machine")
        job, reported = worker.lab.next_attempt()
        assert (reported["resume_from"]["path"], job.start_step) == (str(newest), 20)
        assert (newest / "weights").read_bytes() == written and "was fetched" in job.remarks[0]
        assert set(worker.lab.bad_reasons().values()) == {None}

    def test_takes_a_good_copy_rather_than_an_older_checkpoint(self, worker: Worker) -> None:
        worker.save(10)
        newest = worker.save(20)
        worker.replicator.start()
        worker.until_copied(2)
        flip(newest)
        job, _ = worker.lab.next_attempt()
        assert job.start_step == 20 and "other contents" in job.remarks[0]
        assert manifest.verify(newest, worker.rows()[-1].manifest_sha256) == []
        assert set(worker.lab.bad_reasons().values()) == {None}

    def test_takes_no_copy_that_is_damaged_or_half(self, worker: Worker, tmp_path: Path) -> None:
        worker.save(10)
        worker.save(20)
        worker.replicator.start()
        worker.until_copied(2)
        flip(next((tmp_path / "shared").rglob("checkpoint-20")))
        worker.moves(tmp_path / "the first machine")
        job, _ = worker.lab.next_attempt()
        assert job.start_step == 10 and "the replica is corrupt" in job.remarks[0]

    def test_waits_for_a_store_that_is_away_rather_than_start_over(
        self, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker.save(10)
        worker.replicator.start()
        worker.until_copied(1)
        worker.moves(tmp_path / "the first machine")
        (tmp_path / "shared").rename(tmp_path / "away")
        monkeypatch.setattr(restore, "_PAUSE_SECONDS", 0.0)
        with pytest.raises(JobError, match="cannot be fetched now") as refused:
            worker.lab.next_attempt()
        assert refused.value.is_transient and worker.lab.bad_reasons() == {10: None}
        (tmp_path / "away").rename(tmp_path / "shared")
        trainer = worker.lab.trainer
        assert prepare(worker.lab.context, run_row(worker.engine, trainer.run_id), CPU, WAITS).start_step == 10

    def test_calls_what_was_never_copied_and_is_not_here_no_damage(self, worker: Worker, tmp_path: Path) -> None:
        worker.save(10)
        worker.moves(tmp_path / "the first machine")
        job, _ = worker.lab.next_attempt()
        assert job.start_step == 0 and worker.lab.bad_reasons() == {10: None}


class TestTheThread:
    def test_a_store_that_is_away_is_reported_once_and_waited_for(self, worker: Worker, tmp_path: Path) -> None:
        (tmp_path / "shared").rename(tmp_path / "away")
        said: list[NewEvent] = []
        with worker.replicator.log_to(worker.lab.trainer.run_id, said.append):
            worker.save(10)
            worker.replicator.start()
            eventually(lambda: worker.replicator._pause > 1, what="a second try")
            worker.save(20)
            (tmp_path / "away").rename(tmp_path / "shared")
            worker.until_copied(2)
            eventually(lambda: len(said) > 1)
        lines = [json.loads(event.data)["line"] for event in said]
        assert len(lines) == 2 and "mount it" in lines[0] and "again" in lines[1]

    def test_what_a_killed_worker_left_uncopied_is_taken_up(self, worker: Worker) -> None:
        worker.lab.save(10)  # and nobody was told of it
        with worker.engine.begin() as connection:
            connection.execute(
                text(
                    "UPDATE checkpoints SET created_at = now() - interval '1 h', "
                    "replica_started_at = now() - interval '1 h'"
                )
            )
        worker.replicator.start()
        worker.until_copied(1)

    def test_copies_go_with_what_retention_removes(self, worker: Worker, tmp_path: Path) -> None:
        for step in (10, 20, 30):
            worker.save(step)
        worker.replicator.start()
        worker.until_copied(3)
        with worker.engine.begin() as connection:
            retention.retire(connection, worker.lab.trainer.run_id, 1)
        worker.replicator.tidy()
        # What is being removed cannot be walked through.
        eventually(lambda: [row.replica_started_at is None for row in worker.rows()] == [True, True, False])
        assert [path.name for path in (tmp_path / "shared").rglob("checkpoint-*")] == ["checkpoint-30"]

    def test_one_that_is_retired_on_its_way_leaves_nothing(
        self, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send = worker.replicator.remote.send

        def slowly(*arguments: Any) -> None:
            send(*arguments)
            with worker.engine.begin() as connection:
                connection.execute(text("UPDATE checkpoints SET deleted_at = now()"))

        monkeypatch.setattr(worker.replicator.remote, "send", slowly)
        worker.save(10)
        worker.replicator.start()
        eventually(lambda: worker.rows()[0].deleted_at and worker.rows()[0].replica_started_at is None)
        assert files_below(tmp_path / "shared") == []

    async def test_copies_go_with_a_deleted_run_whatever_ends_the_worker_meanwhile(
        self, worker: Worker, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker.save(10)
        worker.replicator.start()
        worker.until_copied(1)
        worker.replicator.close()
        worker.lab.trainer.complete()
        database = async_engine(settings.database_url or "")
        async with async_sessionmaker(database)() as session, session.begin():
            await deletion.delete_run(session, worker.lab.trainer.run_id)
        await database.dispose()

        def killed(_: Path) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(worker.replicator.remote, "remove", killed)
            with pytest.raises(KeyboardInterrupt):
                worker.replicator.sweep()
        assert files_below(tmp_path / "shared")
        worker.replicator.sweep()
        assert files_below(tmp_path / "shared") == []
        with worker.engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM replica_deletions")) == 0


class TestTheEndOfARun:
    LEASE = {"fenced": False, "expired": False}

    def settled(self, worker: Worker, seconds: float) -> list[dict[str, Any]]:
        """What the run is told while it waits for its copies, at most so long."""
        reported: list[NewEvent] = []
        lease: Any = SimpleNamespace(run_id=worker.lab.trainer.run_id, **self.LEASE)
        worker.replicator.settle(
            lease.run_id, lambda: lease.fenced or lease.expired, reported.append, time.monotonic() + seconds
        )
        return [json.loads(event.data) for event in reported]

    def test_waits_for_the_copies(self, worker: Worker) -> None:
        worker.save(10)
        worker.replicator.start()
        assert [one.get("phase", "nothing was left") for one in self.settled(worker, 30)] in ([], ["copying"])
        assert worker.rows()[0].replicated_at is not None

    def test_names_what_has_none_when_the_time_is_over(self, worker: Worker) -> None:
        worker.save(10)  # and nobody sends it
        waiting, left = self.settled(worker, 0.3)
        assert "copying checkpoint-10" in waiting["message"] and "no replica of checkpoint-10" in left["line"]

    def test_does_not_wait_for_a_store_that_is_away(self, worker: Worker, tmp_path: Path) -> None:
        (tmp_path / "shared").rename(tmp_path / "away")
        worker.save(10)
        worker.replicator.start()
        began = time.monotonic()
        assert "no replica of checkpoint-10" in self.settled(worker, 60)[-1]["line"]
        assert time.monotonic() - began < 20


class TestTheSetting:
    @pytest.mark.parametrize("url", ["/mnt/share", "s3://key:secret@bucket", "s3://bucket?key=1", "s3://bucket/a b"])
    def test_is_a_place_without_credentials(self, url: str) -> None:
        with pytest.raises(ValueError, match="AWS_ACCESS_KEY_ID"):
            Settings(checkpoint_url=url)

    def test_of_an_unknown_kind_keeps_a_worker_from_starting(self, settings: Settings) -> None:
        with pytest.raises(SetupError, match="ANNEAL_CHECKPOINT_URL=nosuch://there cannot be used"):
            RemoteStore("nosuch://there", Storage(settings))

    def test_no_training_process_gets_it_or_its_credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "ANNEAL_CHECKPOINT_URL"):
            monkeypatch.setenv(name, "s3://credential")
        assert "s3://credential" not in Settings().trainer_environment().values()

    def test_a_share_that_is_not_mounted_is_not_made(self, settings: Settings, tmp_path: Path) -> None:
        folder, digest = whole(settings)
        with pytest.raises(StoreUnavailable, match="mount it"):
            RemoteStore(f"file://{tmp_path}/unmounted", Storage(settings)).send(folder, digest, lambda: None)
        assert not (tmp_path / "unmounted").exists()
