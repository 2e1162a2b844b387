"""The working copy of an object store: verified before each use, fetched once, and never larger than it may be."""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, insert, update

from app.config import Settings
from app.infra.files.object_store import StoreUnavailable
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.tables.administration.installation import Installation
from app.tables.datasets import Dataset
from tests.factories import Trainer, mark_checkpoint, mark_run
from tests.rows import add_run
from tests.waiting import eventually
from tests.worker.attempts.test_job_builder import flip
from tests.worker.checkpoint_store.store_lab import StoreLab, share  # noqa: F401
from worker.attempts.job_error import JobError
from worker.checkpoint_files import manifest
from worker.checkpoint_store import working_copy
from worker.checkpoint_store.remote_store import CorruptInStore, MissingInStore, RemoteStore, TransferCancelled
from worker.checkpoint_store.working_copy import WorkingCopy

RUN, OTHER = new_id("run"), new_id("run")

# ruff: noqa: F811


def never() -> None:
    """A run that nobody wants to end."""


class Host:
    """A worker's machine with a working copy of at most 10,000 bytes."""

    def __init__(self, settings: Settings, engine: Engine, home: Path, url: str, limit: int = 10_000) -> None:
        self.engine = engine
        changed = Settings(**{**settings.model_dump(), "home": home, "storage": url})
        self.storage = Storage(changed)
        self.remote = RemoteStore(url, self.storage)
        self.copy = WorkingCopy(self.remote, self.storage, engine, limit, 0)

    def store(self, size: int, *, has_row: bool = True) -> tuple[Path, int, str]:
        """A dataset in the store; answers the arguments of `WorkingCopy.dataset`."""
        content = os.urandom(size)
        id, sha256 = new_id("ds"), hashlib.sha256(content).hexdigest()
        path = self.storage.dataset_file(id, "jsonl")
        self.remote.objects.put(self.storage.key_of(path), iter([content]))
        row = {"id": id, "name": "x", "format": "text", "extension": "jsonl", "rows": 1, "bytes": size, "columns": []}
        if has_row:
            with self.engine.begin() as connection:
                connection.execute(insert(Dataset).values(**row, sha256=sha256, preview=[], source={}))
        return path, size, sha256

    def here(self) -> set[str]:
        return {path.name for path in (self.storage.root / "datasets").iterdir()}


@pytest.fixture
def host(settings: Settings, engine: Engine, tmp_path: Path, share: Path) -> Host:
    return Host(settings, engine, tmp_path / "one", f"file://{share}")


@pytest.fixture
def gets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Files that are fetched from the store."""
    fetched: list[Path] = []
    fetch = RemoteStore.fetch_file

    def noted(self: RemoteStore, path: Path, *rest: Any) -> None:
        fetched.append(path)
        fetch(self, path, *rest)

    monkeypatch.setattr(RemoteStore, "fetch_file", noted)
    yield fetched


class TestADataset:
    def test_is_fetched_once_and_again_if_a_byte_differs(self, host: Host, gets: list[Path]) -> None:
        path, size, sha256 = host.store(5000)
        with host.copy.used_by(RUN):
            host.copy.fetch_dataset(RUN, path, size, sha256, never)
            host.copy.fetch_dataset(RUN, path, size, sha256, never)
        assert len(gets) == 1 and hashlib.sha256(path.read_bytes()).hexdigest() == sha256
        path.write_bytes(b"x" * size)
        with host.copy.used_by(RUN):
            host.copy.fetch_dataset(RUN, path, size, sha256, never)
        assert len(gets) == 2 and hashlib.sha256(path.read_bytes()).hexdigest() == sha256
        path.unlink()
        path.symlink_to("/etc/passwd")
        with host.copy.used_by(RUN):
            host.copy.fetch_dataset(RUN, path, size, sha256, never)
        assert not path.is_symlink() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256

    @pytest.mark.parametrize("removed", ["datasets", "locks", "."])
    def test_is_fetched_again_once_an_operator_has_removed_the_folders(self, host: Host, removed: str) -> None:
        path, size, sha256 = host.store(5000)
        shutil.rmtree(host.storage.root / removed)
        host.copy.make_room()  # as a worker without a run does
        shutil.rmtree(host.storage.root / removed)
        with host.copy.used_by(RUN):
            host.copy.fetch_dataset(RUN, path, size, sha256, never)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256

    def test_that_differs_in_the_store_or_is_missing_there_is_not_used(self, host: Host, share: Path) -> None:
        path, size, sha256 = host.store(100)
        (share / host.storage.key_of(path)).write_bytes(b"x" * size)
        with host.copy.used_by(RUN):
            with pytest.raises(CorruptInStore):
                host.copy.fetch_dataset(RUN, path, size, sha256, never)
            assert not path.exists()
            host.remote.remove_folder(path.parent)
            with pytest.raises(MissingInStore):
                host.copy.fetch_dataset(RUN, path, size, sha256, never)

    def test_of_a_store_that_is_away_is_tried_again_and_then_reported(
        self, host: Host, share: Path, monkeypatch: pytest.MonkeyPatch, gets: list[Path]
    ) -> None:
        path, size, sha256 = host.store(100)
        monkeypatch.setattr(working_copy, "_PAUSE_SECONDS", 0.0)
        share.rename(share.with_name("away"))
        with host.copy.used_by(RUN), pytest.raises(StoreUnavailable):
            host.copy.fetch_dataset(RUN, path, size, sha256, never)
        assert len(gets) == 3

    def test_that_two_hosts_of_one_folder_want_is_fetched_once(
        self, settings: Settings, engine: Engine, host: Host, share: Path, tmp_path: Path, gets: list[Path]
    ) -> None:
        path, size, sha256 = host.store(5000)
        other = Host(settings, engine, tmp_path / "one", f"file://{share}")
        errors: list[Exception] = []

        def use(copy: WorkingCopy, run_id: str) -> None:
            try:
                with copy.used_by(run_id):
                    copy.fetch_dataset(run_id, path, size, sha256, never)
            except Exception as error:
                errors.append(error)

        threads = [
            threading.Thread(target=use, args=(copy, f"{run}{number}"))
            for number in range(5)
            for copy, run in ((host.copy, RUN), (other.copy, OTHER))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == [] and len(gets) == 1

    def test_is_not_waited_for_once_the_run_is_to_end(self, host: Host) -> None:
        path, size, sha256 = host.store(100)
        with host.copy.fetch_lock(path.parent, never), host.copy.used_by(RUN), pytest.raises(TransferCancelled):
            host.copy.fetch_dataset(RUN, path, size, sha256, cancelled)


def cancelled() -> None:
    raise TransferCancelled


class TestItsSize:
    def test_is_bounded_and_the_least_recently_used_goes_first(self, host: Host) -> None:
        first, second, third = (host.store(4000) for _ in range(3))
        for dataset in (first, second, first):
            with host.copy.used_by(RUN):
                host.copy.fetch_dataset(RUN, *dataset, never)
            used_at = time.time()
            eventually(lambda used_at=used_at: time.time() > used_at + 0.01)  # the times of two uses differ
        with host.copy.used_by(RUN):
            host.copy.fetch_dataset(RUN, *third, never)
        assert host.here() == {first[0].parent.name, third[0].parent.name}

    def test_takes_nothing_from_a_run(self, settings: Settings, engine: Engine, host: Host, share: Path) -> None:
        """The other worker of the machine is another process, and asks for all of the space."""
        first, second = host.store(4000), host.store(9000)
        other = Host(settings, engine, host.storage.root.parent, f"file://{share}")
        with host.copy.used_by(RUN):
            host.copy.fetch_dataset(RUN, *first, never)
            with other.copy.used_by(OTHER):
                other.copy.fetch_dataset(OTHER, *second, never)
                assert host.here() == {first[0].parent.name, second[0].parent.name}
            assert host.here() == {first[0].parent.name}

    def test_is_given_up_where_the_disk_is_smaller_than_the_limit(
        self, settings: Settings, engine: Engine, host: Host, share: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def free_bytes(folder: Path) -> int:
            return 15_000 + 2**20 - sum(path.stat().st_size for path in folder.rglob("data.jsonl"))

        monkeypatch.setattr("worker.checkpoint_files.disk_space.free_bytes", free_bytes)
        host = Host(settings, engine, host.storage.root.parent, f"file://{share}", limit=10**9)
        first, second, third = (host.store(6000) for _ in range(3))
        with host.copy.used_by(RUN):
            host.copy.fetch_dataset(RUN, *first, never)
        with host.copy.used_by(RUN):
            host.copy.fetch_dataset(RUN, *second, never)
            with host.copy.used_by(OTHER):
                host.copy.fetch_dataset(OTHER, *third, never)
                assert host.here() == {second[0].parent.name, third[0].parent.name}
                with pytest.raises(OSError, match="does not fit"):
                    host.copy.fetch_dataset(OTHER, *first, never)

    def test_does_not_cost_a_checkpoint_that_is_still_to_be_sent(self, host: Host, engine: Engine) -> None:
        trainer = Trainer(engine, add_run(engine).id)
        trainer.checkpoint(5)
        trainer.complete()
        mark_run(engine, trainer.run_id, finished_at=datetime.now(UTC) - timedelta(days=30))  # an outage may last
        attempts = [host.storage.attempt_dir(trainer.run_id, number) for number in (1, 2)]
        for folder in attempts:
            (folder / "checkpoint-5").mkdir(parents=True)
            (folder / "checkpoint-5" / "weights").write_bytes(b"x" * 20_000)
        host.copy.make_room()
        assert [folder.exists() for folder in attempts] == [True, False]

    def test_is_not_spent_on_what_was_deleted(self, host: Host) -> None:
        dataset, run = host.store(10, has_row=False), host.storage.attempt_dir(new_id("run"), 1)
        run.mkdir(parents=True)
        (run.parent / "journal.jsonl").write_text("{}\n")
        with host.copy.used_by(RUN):
            host.copy.fetch_dataset(RUN, *dataset, never)
            host.copy.make_room()
            assert host.here() == {dataset[0].parent.name}, "a run uses it"
        assert host.here() == set() and not run.parent.exists()

    def test_is_not_spent_on_runs_that_have_ended_or_on_locks_of_what_is_gone(self, host: Host, engine: Engine) -> None:
        trainer, live = Trainer(engine, add_run(engine).id), add_run(engine).id
        trainer.complete()
        for run_id in (trainer.run_id, live):
            host.storage.run_dir(run_id).mkdir(parents=True)
            for name in ("journal.jsonl", "trainer.lock"):
                (host.storage.run_dir(run_id) / name).touch()
        old, new = (host.storage.root / "locks" / f"runs.{new_id('run')}.a1" for _ in range(2))
        old.touch()
        new.touch()
        os.utime(old, (0, 0))
        host.copy.make_room()
        assert [path.name for path in host.storage.runs.iterdir()] == [live]
        assert list(old.parent.iterdir()) == [new]


class TestAnOutput:
    def test_is_fetched_verified_and_nothing_else(self, host: Host, settings: Settings, tmp_path: Path) -> None:
        of = (add_run(host.engine).id, 1)
        writer = Host(settings, host.engine, tmp_path / "two", host.remote.url)
        output, described = writer.storage.output_dir(*of), writer.storage.output_manifest(*of)
        (output / "deep").mkdir(parents=True)
        (output / "deep" / "weights").write_bytes(b"w" * 1000)
        (output / "manifest.json").write_text("of the trainer")
        (output / "link").symlink_to("/etc/passwd")
        sha256 = writer.remote.send_described(output, described, lambda _: True, {}, never)
        for damage in (None, "other", "more", "link"):
            folder = host.storage.output_dir(*of)
            if damage == "other":
                (folder / "deep" / "weights").write_bytes(b"v" * 1000)
            elif damage == "more":
                (folder / "extra").touch()
            elif damage == "link":
                folder.rename(folder.with_name("moved"))
                folder.symlink_to("/etc")
            with host.copy.used_by(RUN):
                assert host.copy.fetch_output(RUN, of, sha256, "wrk_test", never) == folder
                assert not folder.is_symlink()
                files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
                assert files == ["deep/weights", "manifest.json"]
                assert (folder / "deep" / "weights").read_bytes() == b"w" * 1000

    def test_of_another_hash_is_refused(self, host: Host, share: Path) -> None:
        of = (new_id("run"), 1)
        described = share / host.storage.key_of(host.storage.output_manifest(*of))
        described.parent.mkdir(parents=True)
        described.write_text('{"files": {"../../outside": {"bytes": 1, "sha256": ""}}}')
        with host.copy.used_by(RUN):
            with pytest.raises(CorruptInStore):
                host.copy.fetch_output(RUN, of, "0" * 64, "wrk_test", never)
            with pytest.raises(CorruptInStore):
                host.copy.fetch_output(RUN, of, hashlib.sha256(described.read_bytes()).hexdigest(), "wrk_test", never)

    def test_that_is_sent_again_after_an_outage_sends_only_the_rest(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        of = (new_id("run"), 1)
        output, described = host.storage.output_dir(*of), host.storage.output_manifest(*of)
        output.mkdir(parents=True)
        for name in "abc":
            (output / name).write_text(name)
        put, keys, sent = host.remote.objects.put, [], {}

        def failing(key: str, pieces: Any) -> None:
            if key.endswith("/c") and not keys[2:]:
                keys.append("outage")
                raise StoreUnavailable("it does not answer")
            keys.append(key.rpartition("/")[2])
            put(key, pieces)

        monkeypatch.setattr(host.remote.objects, "put", failing)
        with pytest.raises(StoreUnavailable):
            host.remote.send_described(output, described, lambda _: True, sent, never)
        host.remote.send_described(output, described, lambda _: True, sent, never)
        assert keys == ["a", "b", "outage", "c", "output.manifest.json"]


class TestAWorkerWithAnotherStorage:
    def test_fails_no_run_for_it_and_names_its_storage(self, settings: Settings, engine: Engine, share: Path) -> None:
        lab = StoreLab(settings, engine, share)
        for root in (lab.storage.root, share):
            shutil.rmtree(root / "datasets")
        with pytest.raises(JobError) as refused:
            lab.next_attempt()
        assert (refused.value.code, refused.value.is_transient) == ("bad_data", True)
        assert f"file://{share}" in refused.value.message

    def test_unavailable_store_starts_no_attempt_even_if_all_files_are_here(
        self, settings: Settings, engine: Engine, share: Path
    ) -> None:
        lab = StoreLab(settings, engine, share)
        share.rename(share.with_name("away"))
        with pytest.raises(JobError, match="cannot be used") as no:
            lab.next_attempt()
        assert (no.value.code, no.value.pause_seconds) == ("storage_unavailable", 60.0)
        share.with_name("away").rename(share)
        with engine.begin() as connection:
            connection.execute(update(Installation).values(id="ins_other"))
        with pytest.raises(JobError, match="another inst") as no:
            lab.next_attempt()
        assert no.value.pause_seconds == 0.0, "another worker may have the right one"

    def test_store_without_permission_delays_no_other_worker(
        self, settings: Settings, engine: Engine, share: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lab = StoreLab(settings, engine, share)
        (dataset,) = lab.storage.root.glob("datasets/*")
        shutil.rmtree(dataset)
        monkeypatch.setattr(working_copy, "_PAUSE_SECONDS", 0.0)

        def refuses(*_: Any, **__: Any) -> Any:
            raise PermissionError("403")

        monkeypatch.setattr(lab.remote.objects.files, "open", refuses)
        with pytest.raises(JobError) as refused:
            lab.next_attempt()
        assert (refused.value.code, refused.value.pause_seconds) == ("storage_unavailable", 0.0)


class TestTheNextAttempt:
    def test_has_the_best_checkpoint_too_for_its_output(self, settings: Settings, engine: Engine, share: Path) -> None:
        lab = StoreLab(settings, engine, share)
        for step, loss in ((10, 1.0), (20, 2.0)):
            lab.save_queued(step)
            assert lab.uploader._send_checkpoint(lab.rows()[-1])
            mark_checkpoint(engine, lab.ids[step], metrics={"eval_loss": loss})
        shutil.rmtree(lab.storage.root / "runs")
        shutil.rmtree(lab.storage.root / "datasets")
        (lab.storage.root / "datasets").mkdir()
        job, reported = lab.next_attempt()
        best = reported["best_checkpoint"]
        assert (job.start.step, best["step"]) == (20, 10)
        assert manifest.verify(Path(best["path"]), best["manifest_sha256"]) == []
        flip(Path(best["path"]))
        lab.next_attempt()
        assert manifest.verify(Path(best["path"]), best["manifest_sha256"]) == [], "it is fetched again"
