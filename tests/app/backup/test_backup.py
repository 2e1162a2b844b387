"""`anneal backup`: complete or not there at all, consistent while the service runs, and cheap the second time."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from sqlalchemy import update

from app.backup.create import BackupJob, CreatedBackup
from app.backup.layout import MANIFEST, UNFINISHED, complete_backups, open_backup
from app.config import Settings
from app.infra.errors import SetupError
from app.tables.checkpoints import Checkpoint
from tests.app.backup.conftest import ROWS, Quiet, Service
from tests.server import ThreadServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "backups"


def back_up(service: Service, folder: Path, progress: Quiet | None = None, keep: int | None = None) -> CreatedBackup:
    return BackupJob(service.settings, folder, progress or Quiet()).run(keep)


def paths(created: CreatedBackup) -> set[str]:
    return {entry.path for entry in created.backup.read_entries()}


def test_backup_has_every_file_that_the_database_knows(service: Service, folder: Path) -> None:
    created = back_up(service, folder)
    run = f"runs/{service.run_id}"
    expected = {f"datasets/{service.dataset}/data.jsonl", f"{run}/journal.jsonl", f"{run}/a1/metrics.jsonl"}
    expected |= {f"{run}/a1/checkpoint-{step}/{name}" for step in (5, 10) for name in ("weights", "manifest.json")}
    assert paths(created) == expected
    assert (created.backup.files / "datasets" / service.dataset / "data.jsonl").read_bytes() == ROWS
    assert created.backup.manifest.problems == created.backup.manifest.removed == []
    assert created.backup.dump.read_bytes()[:5] == b"PGDMP"
    assert created.backup.folder.stat().st_mode & 0o077 == 0


def test_second_backup_links_unchanged_files_and_copies_changed_ones(service: Service, folder: Path) -> None:
    first = back_up(service, folder)
    with service.storage.journal_path(service.run_id).open("a") as journal:
        journal.write('{"event": "step"}\n')
    service.save(15)
    second = back_up(service, folder)
    assert (second.counts.copied, second.counts.reused) == (3, 6)
    assert complete_backups(folder) == [first.backup.folder, second.backup.folder]
    old, new = (it.backup.files / "runs" / service.run_id for it in (first, second))
    assert (old / "a1/checkpoint-5/weights").samefile(new / "a1/checkpoint-5/weights")
    assert (old / "journal.jsonl").read_text() != (new / "journal.jsonl").read_text()


def test_files_of_a_later_attempt_and_half_written_ones_are_left_out(service: Service, folder: Path) -> None:
    run = service.storage.run_dir(service.run_id)
    for path in ("a2/job.json", "a1/checkpoint-15/weights", "a1/.checkpoint-20.tmp/weights", "a1/base_model/weights"):
        (run / path).parent.mkdir(parents=True)
        (run / path).write_text("later")
    orphan = service.storage.root / "datasets" / "ds_01aaaaaaaaaaaaaaaaaaaaaaaa" / "data.jsonl"
    orphan.parent.mkdir()
    orphan.write_text("{}")
    assert not {path for path in paths(back_up(service, folder)) if "later" in path or "a2/" in path}
    assert len(paths(back_up(service, folder))) == 7


def test_links_that_a_trainer_made_are_not_followed(service: Service, folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a password")
    attempt = service.storage.attempt_dir(service.run_id, 1)
    (attempt / "link").symlink_to(secret)
    (attempt / "folder").symlink_to(tmp_path)
    os.mkfifo(attempt / "pipe")
    created = back_up(service, folder)
    assert len(paths(created)) == 7
    assert not any("password" in path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("linked", ["", "runs", "datasets"])
def test_links_that_the_operator_made_to_another_disk_are_followed(
    service: Service, folder: Path, tmp_path: Path, linked: str
) -> None:
    place = service.storage.root / linked
    place.rename(tmp_path / "disk")
    place.symlink_to(tmp_path / "disk")
    created = back_up(service, folder)
    assert created.backup.manifest.problems == [] and len(paths(created)) == 7


class TestWhatCannotBeRead:
    """A trainer must not prevent the backup of what belongs to others."""

    @pytest.mark.parametrize(("name", "code"), [("file", errno.EACCES), ("file", errno.EIO), ("folder", errno.EACCES)])
    def test_unreadable_file_is_reported_and_the_rest_backed_up(
        self, service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
    ) -> None:
        attempt = service.storage.attempt_dir(service.run_id, 1)
        for path in ("file", "folder/below"):
            (attempt / path).parent.mkdir(exist_ok=True)
            (attempt / path).write_text("x")
        opened = os.open

        def fail(path: str | Path, *arguments: int, dir_fd: int | None = None) -> int:
            if path == name and dir_fd is not None:
                raise OSError(code, os.strerror(code))
            return opened(path, *arguments, dir_fd=dir_fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail)
            manifest = back_up(service, folder).backup.manifest
        assert [(it.kind, it.id) for it in manifest.problems] == [("file", f"runs/{service.run_id}/a1/{name}")]
        assert manifest.problems[0].problem == f"cannot be read ({os.strerror(code)})" and manifest.files == 8

    def test_file_with_too_long_path_is_reported_with_escapes(self, service: Service, folder: Path) -> None:
        place = os.open(service.storage.attempt_dir(service.run_id, 1), os.O_RDONLY)
        for _ in range(20):
            os.mkdir("n" * 250, dir_fd=place)
            below = os.open("n" * 250, os.O_RDONLY, dir_fd=place)
            os.close(place)
            place = below
        os.close(os.open("not UTF-8: \udcff", os.O_WRONLY | os.O_CREAT, dir_fd=place))
        os.close(place)
        manifest = back_up(service, folder).backup.manifest
        (problem,) = manifest.problems
        assert problem.id.endswith("/not UTF-8: \\udcff")
        assert problem.problem == "has a path that is too long" and manifest.files == 7


class TestWhileTheServiceRuns:
    def test_what_is_written_after_the_dump_does_not_make_it_inconsistent(self, service: Service, folder: Path) -> None:
        def during(label: str) -> None:
            if label == "Copying files":
                service.save(15)

        created = back_up(service, folder, Quiet(during))
        assert not {path for path in paths(created) if "checkpoint-15" in path}
        assert created.backup.manifest.problems == created.backup.manifest.removed == []

    def test_a_checkpoint_that_is_deleted_meanwhile_is_listed_as_removed_and_is_no_problem(
        self, service: Service, folder: Path
    ) -> None:
        def during(label: str) -> None:
            if label == "Copying files":
                with service.engine.begin() as connection:
                    statement = update(Checkpoint).where(Checkpoint.id == service.checkpoints[5])
                    connection.execute(statement.values(deleted_at=Checkpoint.created_at))
                shutil.rmtree(service.storage.checkpoint_dir(service.run_id, 1, 5))

        manifest = back_up(service, folder, Quiet(during)).backup.manifest
        assert [problem.id for problem in manifest.removed] == [service.checkpoints[5]]
        assert manifest.problems == []


def test_missing_and_corrupt_files_are_named_and_the_rest_is_backed_up(service: Service, folder: Path) -> None:
    service.storage.dataset_file(service.dataset, "jsonl").write_bytes(ROWS.replace(b"row", b"raw"))
    (service.storage.checkpoint_dir(service.run_id, 1, 5) / "weights").unlink()
    shutil.rmtree(service.storage.checkpoint_dir(service.run_id, 1, 10))
    manifest = back_up(service, folder).backup.manifest
    assert {problem.id: problem.problem.partition(" (")[0] for problem in manifest.problems} == {
        service.dataset: "its file has other contents than were stored",
        service.checkpoints[5]: "weights is missing",
        service.checkpoints[10]: "its files are missing",
    }
    assert manifest.files == 4


def test_uploaded_file_beside_the_rows_is_backed_up_and_compared(service: Service, folder: Path) -> None:
    rows = b'{"text": "no newline"}'
    with ThreadServer(service.settings) as api:
        parts = {"file": ("rows.jsonl", rows), "purpose": (None, "fine-tune")}
        dataset_id = api.client.post("/openai/v1/files", files=parts).json()["id"].replace("file-", "ds_")
    backup = back_up(service, folder).backup
    assert backup.manifest.problems == []
    assert (backup.files / "datasets" / dataset_id / "data.original").read_bytes() == rows
    service.storage.dataset_file(dataset_id, "original").unlink()
    (problem,) = back_up(service, folder).backup.manifest.problems
    assert (problem.id, problem.problem) == (dataset_id, "its file is missing")


class TestInterruption:
    def test_backup_that_was_interrupted_is_none_and_is_continued_with_what_it_has(
        self, service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, "sync", interrupt)
            with pytest.raises(KeyboardInterrupt):
                back_up(service, folder)
        with pytest.raises(SetupError, match="only an unfinished one, which was interrupted: run `anneal backup`"):
            open_backup(folder)
        created = back_up(service, folder)
        assert (created.counts.copied, created.counts.reused) == (0, 7)
        assert not (folder / UNFINISHED).exists() and open_backup(folder).folder == created.backup.folder

    def test_half_copied_file_is_copied_again(
        self, service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        utime = os.utime

        def interrupt(path: Path, **options: object) -> None:
            if "checkpoint-10" in str(path):
                path.write_bytes(b"half")
                raise KeyboardInterrupt
            utime(path, **options)  # type: ignore[call-overload]

        with monkeypatch.context() as patch:
            patch.setattr(os, "utime", interrupt)
            with pytest.raises(KeyboardInterrupt):
                back_up(service, folder)
        created = back_up(service, folder)
        assert created.counts.reused > 0 and created.backup.manifest.problems == []

    def test_two_at_a_time_in_one_folder_are_refused(self, service: Service, folder: Path) -> None:
        sentences = []

        def during(label: str) -> None:
            if label == "Copying files":
                with pytest.raises(SetupError) as error:
                    back_up(service, folder)
                sentences.append(str(error.value))

        back_up(service, folder, Quiet(during))
        assert sentences == [f"Another `anneal backup` writes to {folder}: wait for its end."]


def test_older_backups_are_deleted_on_request(service: Service, folder: Path) -> None:
    for _ in range(3):
        back_up(service, folder)
    created = back_up(service, folder, keep=2)
    assert len(complete_backups(folder)) == 2 and len(created.deleted) == 2
    assert (created.backup.files / "datasets" / service.dataset / "data.jsonl").read_bytes() == ROWS


def test_last_backup_without_problems_survives_those_of_a_storage_that_is_not_mounted(
    service: Service, folder: Path, tmp_path: Path
) -> None:
    whole = back_up(service, folder).backup.folder
    service.storage.root.rename(tmp_path / "unmounted")
    service.storage.root.mkdir()
    broken = [back_up(service, folder, keep=1).backup.folder for _ in range(3)]
    assert complete_backups(folder) == [whole, broken[-1]]


def test_backup_that_was_renamed_is_neither_the_newest_nor_deleted(service: Service, folder: Path) -> None:
    renamed = back_up(service, folder).backup.folder.rename(folder / "before-the-upgrade")
    older, newer = (back_up(service, folder, keep=1).backup.folder for _ in range(2))
    assert open_backup(folder).folder == newer and not older.exists()
    assert open_backup(renamed).folder == renamed


def test_backup_just_made_is_not_deleted_although_the_clock_was_ahead_before(service: Service, folder: Path) -> None:
    ahead = back_up(service, folder).backup.folder.rename(folder / "2100-01-01T000000Z")
    created = back_up(service, folder, keep=1)
    assert complete_backups(folder) == [created.backup.folder, ahead]


def test_backups_of_one_second_are_in_the_order_of_their_numbers(service: Service, folder: Path) -> None:
    original = back_up(service, folder).backup.folder
    for name in ("2026-01-01T000000Z", "2026-01-01T000000Z-2", "2026-01-01T000000Z-10"):
        shutil.copytree(original, folder / name)
    shutil.rmtree(original)
    assert open_backup(folder).folder.name == "2026-01-01T000000Z-10"


class TestSentences:
    def test_folder_inside_the_storage_is_refused(self, service: Service) -> None:
        with pytest.raises(SetupError, match="overlaps the storage"):
            back_up(service, service.storage.root / "backups")

    def test_a_backup_as_folder_is_refused(self, service: Service, folder: Path) -> None:
        created = back_up(service, folder)
        with pytest.raises(SetupError, match="is a backup itself: name the folder above it"):
            back_up(service, created.backup.folder)

    def test_database_without_tables_is_refused(self, empty: Settings, folder: Path) -> None:
        with pytest.raises(SetupError, match="no tables of Anneal"):
            BackupJob(empty, folder, Quiet()).run()

    def test_home_without_a_database_is_refused(self, tmp_path: Path, folder: Path) -> None:
        with pytest.raises(SetupError, match="has no database: set ANNEAL_HOME"):
            BackupJob(Settings(home=tmp_path / "nothing"), folder, Quiet()).run()

    def test_disk_without_room_is_reported_before_anything_is_copied(
        self, service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(service.storage.root)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(SetupError, match="GB of free space, but the backup needs"):
            back_up(service, folder)

    def test_manifest_of_a_later_format_names_the_version(self, service: Service, folder: Path) -> None:
        path = back_up(service, folder).backup.folder / MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
        with pytest.raises(SetupError, match="later version of Anneal"):
            open_backup(folder)
