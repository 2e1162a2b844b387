"""`anneal restore`: the service is there as it was, nothing is overwritten, and a half restore is no service."""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, select, update

from app.backup.create import BackupJob
from app.backup.layout import DUMP, INVENTORY, MANIFEST, Backup
from app.backup.restore import RestoredBackup, RestoreJob
from app.config import Settings
from app.infra.db import sync_engine
from app.infra.errors import SetupError
from app.infra.files.unfinished_restore import refuse_unfinished_restore
from app.infra.home_lock import HomeLock
from app.infra.storage import Storage
from app.tables import migrate
from app.tables.checkpoints import Checkpoint
from tests.app.backup.conftest import ROWS, Quiet, Service
from tests.conftest import Services
from tests.server import ThreadServer


@pytest.fixture(scope="module")
def service(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that no test changes."""
    folder, url = tmp_path_factory.mktemp("service"), services.create_database()
    settings = Settings(
        home=folder / "home", storage=folder / "storage", database_url=url, redis_url=services.fresh_redis(),
        host="127.0.0.1", port=0,
    )  # fmt: skip
    engine = sync_engine(url)
    yield Service(settings, engine)
    engine.dispose()
    services.drop_database(url)


@pytest.fixture(scope="module")
def untouched_backup(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Backup:
    return BackupJob(service.settings, tmp_path_factory.mktemp("backup") / "backups", Quiet()).run().backup


@pytest.fixture
def backup(untouched_backup: Backup, tmp_path: Path) -> Backup:
    """A backup of the service, as a copy that the test may damage."""
    backups = shutil.copytree(untouched_backup.folder.parent, tmp_path / "backups")
    return dataclasses.replace(untouched_backup, folder=backups / untouched_backup.folder.name)


@pytest.fixture
def changing_service(settings: Settings, engine: Engine) -> Service:
    """A service of the test alone."""
    return Service(settings, engine)


def restore(
    settings: Settings, backup: Backup, *, replace: bool = False, progress: Quiet | None = None
) -> RestoredBackup:
    return RestoreJob(settings, backup.folder, progress or Quiet(), replace=replace).run()


def test_restored_service_has_runs_datasets_checkpoints_and_keys_and_files_with_their_modes_and_times(
    service: Service, backup: Backup, empty: Settings
) -> None:
    assert restore(empty, backup).problems == []
    original, copy = (Storage(it).journal_path(service.run_id).stat() for it in (service.settings, empty))
    assert (copy.st_mode, copy.st_mtime_ns) == (original.st_mode, original.st_mtime_ns)
    with ThreadServer(empty) as api, api.client_with(service.key) as client:
        assert client.get(f"/v1/datasets/{service.dataset}/content").content == ROWS
        events = client.get(f"/v1/runs/{service.run_id}/events", params={"follow": "false", "format": "ndjson"})
        assert events.status_code == 200 and events.text.count("\n") >= 3
        for step, checkpoint in service.checkpoints.items():
            content = client.get(f"/v1/runs/{service.run_id}/checkpoints/{checkpoint}/download").content
            assert bytes([step]) * 3000 in content
        assert client.post("/v1/datasets", files={"file": ("more.jsonl", ROWS)}).status_code == 201


def test_checkpoint_that_was_deleted_during_the_backup_is_deleted_in_the_restored_service(
    changing_service: Service, empty: Settings, tmp_path: Path
) -> None:
    def during(label: str) -> None:
        if label == "Copying files":
            with changing_service.engine.begin() as connection:
                statement = update(Checkpoint).where(Checkpoint.id == changing_service.checkpoints[5])
                connection.execute(statement.values(deleted_at=Checkpoint.created_at))
            Storage(changing_service.settings).remove_checkpoint(changing_service.run_id, 1, "checkpoint-5")

    backup = BackupJob(changing_service.settings, tmp_path / "backups", Quiet(during)).run().backup
    assert restore(empty, backup).problems == []
    engine = sync_engine(empty.database_url or "", pool_size=0)
    with engine.connect() as connection:
        stored = connection.scalars(select(Checkpoint.id).where(Checkpoint.deleted_at.is_(None))).all()
    assert list(stored) == [changing_service.checkpoints[10]]


@pytest.fixture
def occupied(backup: Backup, empty: Settings) -> Settings:
    """A place with a service that was restored once; nothing is connected to its database."""
    restore(empty, backup)
    return empty


class TestPlaceThatIsNotEmpty:
    def test_restore_into_nonempty_home_is_refused_and_with_replace_moves_it_aside(
        self, service: Service, backup: Backup, occupied: Settings
    ) -> None:
        Storage(occupied).journal_path(service.run_id).write_text("newer")
        with pytest.raises(SetupError, match=r"There is a service here already .*--replace"):
            restore(occupied, backup)
        assert Storage(occupied).journal_path(service.run_id).read_text() == "newer"
        refuse_unfinished_restore(occupied)
        engine = sync_engine(occupied.database_url or "", pool_size=0)
        with engine.connect(), pytest.raises(SetupError, match="in use by anneal-worker: stop every API"):
            restore(occupied, backup, replace=True)
        restored = restore(occupied, backup, replace=True)
        assert restored.problems == [] and restored.aside is not None
        assert (restored.aside / DUMP).read_bytes()[:5] == b"PGDMP"
        assert (restored.aside / "runs" / service.run_id / "journal.jsonl").read_text() == "newer"
        assert Storage(occupied).journal_path(service.run_id).read_text() == '{"event": "start"}\n'
        with ThreadServer(occupied) as api:
            assert api.client.get(f"/v1/runs/{service.run_id}").status_code == 200

    def test_database_that_was_only_migrated_counts_as_empty(self, backup: Backup, empty: Settings) -> None:
        migrate.upgrade_schema(empty)
        restored = restore(empty, backup)
        assert restored.problems == [] and restored.aside is None

    def test_tables_of_another_program_are_never_replaced(self, backup: Backup, empty: Settings) -> None:
        with psycopg.connect(empty.database_url or "", autocommit=True) as connection:
            connection.execute("CREATE TABLE invoices (id int)")
        for replace in (False, True):
            with pytest.raises(SetupError, match=r"tables of another program \(public.invoices\)"):
                restore(empty, backup, replace=replace)


class TestServiceThatRuns:
    def test_home_of_a_running_anneal_up_is_refused(self, backup: Backup, empty: Settings) -> None:
        with HomeLock(empty.home), pytest.raises(SetupError, match="stop it with `anneal down`, and restore then"):
            restore(empty, backup)


class TestInterruption:
    def test_no_service_starts_on_half_of_the_data_and_the_same_command_continues(
        self, service: Service, backup: Backup, empty: Settings
    ) -> None:
        for label in ("Copying files", "Restoring the database"):

            def during(current: str, label: str = label) -> None:
                if current == label:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                restore(empty, backup, progress=Quiet(during))
            with pytest.raises(SetupError, match=f"run `anneal restore {backup.folder}` to complete it first"):
                refuse_unfinished_restore(empty)
        assert restore(empty, backup).problems == []
        refuse_unfinished_restore(empty)
        assert Storage(empty).dataset_file(service.dataset, "jsonl").read_bytes() == ROWS

    def test_replacing_that_was_interrupted_keeps_what_was_there_before(
        self, service: Service, backup: Backup, occupied: Settings
    ) -> None:
        def during(current: str) -> None:
            if current == "Restoring the database":
                raise KeyboardInterrupt

        Storage(occupied).journal_path(service.run_id).write_text("newer")
        with pytest.raises(KeyboardInterrupt):
            restore(occupied, backup, replace=True, progress=Quiet(during))
        restored = restore(occupied, backup)
        assert restored.aside is not None
        assert (restored.aside / "runs" / service.run_id / "journal.jsonl").read_text() == "newer"
        assert sorted(path.name for path in restored.aside.iterdir()) == [DUMP, "datasets", "runs"]
        assert Storage(occupied).journal_path(service.run_id).read_text() == '{"event": "start"}\n'


class TestDamage:
    @pytest.mark.parametrize("name", [DUMP, INVENTORY])
    def test_damaged_dump_or_inventory_is_reported_before_anything_is_written(
        self, backup: Backup, empty: Settings, name: str
    ) -> None:
        with (backup.folder / name).open("r+b") as file:
            file.seek(20)
            file.write(b"?")
        with pytest.raises(SetupError, match=f"{name} is damaged: restore another backup"):
            restore(empty, backup)
        assert not Path(empty.storage_root).exists()

    def test_damaged_and_missing_files_are_left_out_and_named_and_the_rest_is_restored(
        self, service: Service, backup: Backup, empty: Settings
    ) -> None:
        dataset = f"datasets/{service.dataset}/data.jsonl"
        path = backup.files / dataset
        before = path.stat()
        path.write_bytes(ROWS.replace(b"row", b"raw"))
        os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
        weights = f"runs/{service.run_id}/a1/checkpoint-5/weights"
        (backup.files / weights).unlink()
        problems = {(problem.kind, problem.id) for problem in restore(empty, backup).problems}
        affected = {("dataset", service.dataset), ("checkpoint", service.checkpoints[5])}
        assert problems == affected | {("file", dataset), ("file", weights)}
        assert not (empty.storage_root / dataset).exists()
        with ThreadServer(empty) as api, api.client_with(service.key) as client:
            checkpoint = f"/v1/runs/{service.run_id}/checkpoints/{service.checkpoints[10]}"
            assert client.get(f"{checkpoint}/download").status_code == 200

    def test_backup_that_is_unmounted_meanwhile_interrupts_the_restore(
        self, backup: Backup, empty: Settings, tmp_path: Path
    ) -> None:
        def during(label: str) -> None:
            if label == "Copying files":
                backup.folder.rename(tmp_path / "elsewhere")

        with pytest.raises(SetupError, match="cannot be read any more: mount it, and run the command again"):
            restore(empty, backup, progress=Quiet(during))
        with pytest.raises(SetupError, match="to complete it first"):
            refuse_unfinished_restore(empty)
        (tmp_path / "elsewhere").rename(backup.folder)
        assert restore(empty, backup).problems == []

    def test_what_was_corrupt_in_the_service_is_reported_again(
        self, changing_service: Service, empty: Settings, tmp_path: Path
    ) -> None:
        (changing_service.storage.checkpoint_dir(changing_service.run_id, 1, 5) / "weights").write_bytes(b"?" * 3000)
        backup = BackupJob(changing_service.settings, tmp_path / "backups", Quiet()).run().backup
        (problem,) = restore(empty, backup).problems
        assert (problem.kind, problem.id) == ("checkpoint", changing_service.checkpoints[5])

    def test_backup_of_a_later_version_is_refused(self, backup: Backup, empty: Settings) -> None:
        later = backup.manifest.model_copy(update={"revision": "9999", "version": "7.0"})
        (backup.folder / MANIFEST).write_text(later.model_dump_json())
        with pytest.raises(SetupError, match=r"made by Anneal 7.0 \(database revision 9999\), which is later"):
            restore(empty, backup)

    def test_folder_without_a_backup_is_refused(self, tmp_path: Path, empty: Settings) -> None:
        with pytest.raises(SetupError, match="contains no complete backup; name the folder that was given"):
            RestoreJob(empty, tmp_path, Quiet())

    def test_name_that_leads_out_of_the_storage_is_refused(self, backup: Backup, tmp_path: Path) -> None:
        with (backup.folder / INVENTORY).open("a") as file:
            file.write('{"path":"../../evil","bytes":1,"sha256":"","mtime_ns":0,"mode":420}\n')
        with pytest.raises(SetupError, match="is damaged"):
            list(backup.read_entries())


class TestObjectStore:
    """Its files are not part of a backup, which names it."""

    @pytest.fixture
    def store(self, service: Service, tmp_path: Path) -> Settings:
        return Settings(**{**service.settings.model_dump(), "storage": f"file://{tmp_path / 'bucket'}"})

    @pytest.fixture
    def backup(self, store: Settings, tmp_path: Path) -> Backup:
        return BackupJob(store, tmp_path / "backups", Quiet()).run().backup

    def test_database_is_restored_and_the_store_is_named(
        self, service: Service, store: Settings, backup: Backup, empty: Settings
    ) -> None:
        assert backup.manifest.object_store == store.storage_url and backup.manifest.files == 0
        place = {"storage": store.storage_url, "home": empty.home, "database_url": empty.database_url}
        assert restore(Settings(**{**store.model_dump(), **place}), backup).problems == []
        with sync_engine(empty.database_url or "", pool_size=0).connect() as connection:
            assert list(connection.scalars(select(Checkpoint.run_id).distinct())) == [service.run_id]

    def test_folder_as_storage_is_refused_with_the_url(self, store: Settings, backup: Backup, empty: Settings) -> None:
        with pytest.raises(SetupError, match=f"are in the object store {store.storage_url}: set ANNEAL_STORAGE"):
            restore(empty, backup)

    def test_backup_of_a_folder_is_refused_for_an_object_store(
        self, service: Service, store: Settings, empty: Settings, tmp_path: Path
    ) -> None:
        backup = BackupJob(service.settings, tmp_path / "others", Quiet()).run().backup
        place = {"storage": store.storage_url, "home": empty.home, "database_url": empty.database_url}
        with pytest.raises(
            SetupError, match="restore it with a folder as ANNEAL_STORAGE, then run `anneal storage copy`"
        ):
            restore(Settings(**{**store.model_dump(), **place}), backup)


class TestSecrets:
    @pytest.fixture
    def key(self, changing_service: Service) -> Path:
        """Store a secret; the path of the key file."""
        with ThreadServer(changing_service.settings) as api:
            assert api.client.put("/v1/secrets/hf_token", json={"value": "hf_" + "a" * 30}).status_code < 300
        return changing_service.settings.secret_key_path

    def test_key_file_is_left_out_and_its_absence_is_reported_or_is_restored_for_its_owner_only(
        self, changing_service: Service, key: Path, empty: Settings, tmp_path: Path
    ) -> None:
        created = BackupJob(changing_service.settings, tmp_path / "backups", Quiet()).run()
        assert created.secrets == 1 and not created.has_secret_key
        assert not list((tmp_path / "backups").rglob("secret.key"))
        assert restore(empty, created.backup).unreadable_secrets == 1
        created = BackupJob(changing_service.settings, tmp_path / "with-key", Quiet(), with_secret_key=True).run()
        assert restore(empty, created.backup, replace=True).unreadable_secrets == 0
        assert empty.secret_key_path.read_bytes() == key.read_bytes()
        assert empty.secret_key_path.stat().st_mode & 0o777 == 0o600

    @pytest.mark.needs("root")
    def test_root_gives_the_key_file_and_the_files_to_the_owner_of_the_storage(
        self, changing_service: Service, key: Path, empty: Settings, tmp_path: Path
    ) -> None:
        created = BackupJob(changing_service.settings, tmp_path / "backups", Quiet(), with_secret_key=True).run()
        empty.storage_root.mkdir()
        os.chown(empty.storage_root, 65534, 65534)
        restore(empty, created.backup)
        run_id = changing_service.run_id
        for path in (empty.secret_key_path, Storage(empty).journal_path(run_id), empty.storage_root / "runs"):
            assert path.stat().st_uid == 65534
