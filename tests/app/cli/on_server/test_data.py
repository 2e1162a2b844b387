"""`anneal backup`, `restore`, `export` and `import` say what they did and what is wrong, also by their exit code."""

import json
from pathlib import Path

import pytest

from app.config import Settings
from app.infra.db import sync_engine
from app.tables import migrate
from tests.app.backup.conftest import Service, empty
from tests.app.cli.test_main import anneal, refused

__all__ = ["empty"]


@pytest.fixture
def service(settings: Settings) -> Service:
    return Service(settings, sync_engine(settings.database_url or "", pool_size=0))


def variables(settings: Settings) -> dict[str, str]:
    values = {"HOME": settings.home, "STORAGE": settings.storage, "DATABASE_URL": settings.database_url}
    return {f"ANNEAL_{name}": str(value) for name, value in values.items()}


def test_backup_and_restore_report_their_steps_and_print_the_folder(
    service: Service, settings: Settings, empty: Settings, tmp_path: Path
) -> None:
    folder = tmp_path / "backups"
    done = anneal("backup", str(folder), **variables(settings))
    assert done.returncode == 0, done.stderr
    (backup,) = (it for it in folder.iterdir() if not it.name.startswith("."))
    assert done.stdout == f"{backup}\n"
    assert "Dumping the database …" in done.stderr and "7 files copied" in done.stderr
    again = anneal("backup", str(folder), "--keep", "1", **variables(settings))
    assert "0 files copied (0 bytes), 7 unchanged" in again.stderr and f"Deleted {backup}." in again.stderr

    done = anneal("restore", str(folder), **variables(empty))
    assert done.returncode == 0, done.stderr
    assert "Every dataset, checkpoint and output is as it was stored." in done.stderr
    sentence = anneal("restore", str(folder), "--json", **variables(empty)).stderr.splitlines()[-1]
    assert json.loads(sentence)["code"] == "setup" and "--replace" in sentence
    replaced = json.loads(anneal("restore", str(folder), "--replace", "--json", **variables(empty)).stdout)
    assert Path(replaced["replaced"]).is_dir() and replaced["problems"] == []


def test_corrupt_files_are_named_and_end_both_commands_with_code_1(
    service: Service, settings: Settings, empty: Settings, tmp_path: Path
) -> None:
    service.storage.dataset_file(service.dataset, "jsonl").write_bytes(b"{}")
    for command, place in (("backup", settings), ("restore", empty)):
        done = anneal(command, str(tmp_path / "backups"), **variables(place))
        assert done.returncode == 1
        assert f"dataset {service.dataset}: its file has other contents than were stored" in done.stderr


def test_export_and_import_report_what_they_did_and_print_the_file(
    service: Service, settings: Settings, empty: Settings, tmp_path: Path
) -> None:
    service.trainer.fail()
    archive = tmp_path / "runs.tar"
    done = anneal("export", str(archive), "--run", service.run_id, **variables(settings))
    assert (done.returncode, done.stdout) == (0, f"{archive}\n"), done.stderr
    assert "1 runs, 1 datasets, 1 experiments; 7 files" in done.stderr
    assert "exists: name a new file" in refused(anneal("export", str(archive), **variables(settings)))
    assert "run `anneal migrate`" in refused(anneal("import", str(archive), **variables(empty)))
    migrate.upgrade_schema(empty)
    empty.storage_root.mkdir()
    done = anneal("import", str(archive), **variables(empty))
    assert done.returncode == 0 and "Added: 1 experiments, 1 datasets, 1 runs; 7 files." in done.stderr, done.stderr
    again = json.loads(anneal("import", str(archive), "--json", **variables(empty)).stdout)
    assert again["added"] == {"experiments": 0, "datasets": 0, "runs": 0} and again["present"]["runs"] == 1


def test_error_of_a_data_command_is_one_sentence(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, part in (
        (("restore", str(tmp_path)), "contains no complete backup"),
        (("backup", str(settings.storage_root / "x")), "overlaps the storage"),
        (("backup", str(tmp_path / "file")), "name a folder that you can write to"),
        (("backup", str(tmp_path / "file" / "below")), "name a folder that you can write to"),
    ):
        assert part in refused(anneal(*arguments, **variables(settings)))
    unreachable = {**variables(settings), "ANNEAL_DATABASE_URL": "postgresql://x@127.0.0.1:1/x"}
    for command in (("backup", str(tmp_path / "backups")),):
        assert "The database does not answer" in refused(anneal(*command, **unreachable))


def test_service_does_not_start_on_an_interrupted_restore(settings: Settings) -> None:
    settings.storage_root.mkdir(parents=True)
    (settings.storage_root / ".restoring.json").write_text('{"backup": "/backups/1"}')
    place = {**variables(settings), "ANNEAL_REDIS_URL": settings.redis_url or ""}
    for command in ("up", "api", "worker", "prune --runs-days 1", "backup /backups", "storage copy s3://bucket"):
        assert "run `anneal restore /backups/1` to complete it first" in refused(anneal(*command.split(), **place))
