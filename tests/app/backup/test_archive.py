"""`anneal export` and `import`: another service gets the same runs, each once, and a hostile archive is refused."""

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select, text, update
from sqlalchemy.exc import OperationalError

from app.api_keys.service import create_key_sync
from app.backup.archive_import import ImportedArchive, ImportJob
from app.backup.export import CreatedArchive, ExportJob
from app.backup.tables import TABLES
from app.config import Settings
from app.infra.db import sync_engine
from app.infra.errors import SetupError
from app.infra.storage import Storage
from app.tables import migrate
from app.tables.administration.api_keys import ApiKey
from app.tables.registry import all_models
from app.tables.runs import Run
from tests.app.backup.conftest import ROWS, Quiet, Service
from tests.factories import Trainer, make_experiment, make_run
from tests.rows import count_usage
from tests.server import ThreadServer
from tests.waiting import eventually

Members = dict[str, bytes]


@pytest.fixture
def ended(service: Service) -> Service:
    """A service with a run that has ended."""
    service.trainer.metric(6, loss=1.0)
    service.trainer.complete()
    service.trainer.write_output(service.storage)
    return service


@pytest.fixture
def target(empty: Settings) -> Settings:
    """Settings of another service, with a migrated database and a storage."""
    migrate.upgrade_schema(empty)
    empty.storage_root.mkdir()
    return empty.model_copy(update={"disk_reserve_bytes": 0})


@pytest.fixture
def archive(ended: Service, tmp_path: Path) -> Path:
    return export(ended, tmp_path, with_keys=True).path


def export(service: Service, tmp_path: Path, name: str = "all.tar", **options: Any) -> CreatedArchive:
    return ExportJob(service.settings, tmp_path / name, Quiet(), **options).run()


def import_into(settings: Settings, path: Path, **options: Any) -> ImportedArchive:
    return ImportJob(settings, path, Quiet(), **options).run()


def test_imported_service_shows_runs_events_files_and_datasets_with_their_ids(
    ended: Service, archive: Path, target: Settings
) -> None:
    imported = import_into(target, archive, with_keys=True)
    assert imported.problems == [] and imported.added["runs"] == imported.added["datasets"] == 1
    with (
        ThreadServer(ended.settings) as source,
        ThreadServer(target) as api,
        api.client_with(ended.key) as client,
        source.client_with(ended.key) as original,
    ):
        run = f"/v1/runs/{ended.run_id}"
        query = {"follow": "false", "format": "ndjson"}
        events, expected_events = (it.get(f"{run}/events", params=query).text.splitlines() for it in (client, original))
        assert [*map(json.loads, events)] == [*map(json.loads, expected_events)]
        shown, expected = client.get(run).json(), original.get(run).json()
        paths = dict.fromkeys(("checkpoint_path", "fine_tuned_model"))
        assert {**shown, **paths} == {**expected, **paths}
        assert client.get(f"/v1/datasets/{ended.dataset}/content").content == ROWS
        for step, checkpoint in ended.checkpoints.items():
            assert bytes([step]) * 3000 in client.get(f"{run}/checkpoints/{checkpoint}/download").content
        resumed = client.post(f"{run}/resume", json={"checkpoint_id": ended.checkpoints[5]})
        assert resumed.status_code == 202, resumed.text
        trainer = Trainer(sync_engine(target.database_url or ""), resumed.json()["id"]).begin()
        assert trainer.run_id != ended.run_id


def test_second_import_adds_what_is_new_only_and_keys_only_on_request(
    ended: Service, archive: Path, target: Settings
) -> None:
    assert import_into(target, archive).skipped_keys > 0
    engine = sync_engine(target.database_url or "", pool_size=0)
    with engine.connect() as connection:
        assert list(connection.scalars(select(ApiKey.id))) == []
    before = Storage(target).journal_path(ended.run_id).stat().st_ino
    again = import_into(target, archive, with_keys=True)
    assert again.added == {"api_keys": again.added["api_keys"], "experiments": 0, "datasets": 0, "runs": 0}
    assert again.added["api_keys"] > 0 and again.files == 0
    assert Storage(target).journal_path(ended.run_id).stat().st_ino == before


def test_run_that_was_deleted_is_imported_again_counts_its_usage_once_and_can_be_deleted_again(
    ended: Service, target: Settings, tmp_path: Path
) -> None:
    count_usage(ended.engine)  # which says nothing about the service that imports it
    archive = export(ended, tmp_path, with_keys=True).path
    import_into(target, archive)
    key = create_key_sync(target, "admin", ["admin"])
    engine = sync_engine(target.database_url or "", pool_size=0)
    usage = []
    with ThreadServer(target) as api, api.client_with(key) as client:
        for _ in range(2):
            usage.append(client.get("/v1/usage", params={"from": "2020-01-01"}).json()["total"])
            assert client.delete(f"/v1/runs/{ended.run_id}").status_code == 204
            usage.append(client.get("/v1/usage", params={"from": "2020-01-01"}).json()["total"])
            eventually(lambda: not Storage(target).run_dir(ended.run_id).exists(), what="its files are removed")
            eventually(lambda: _is_imported_again(target, archive), what="the run is imported again")
            count_usage(engine)
        assert client.delete(f"/v1/runs/{ended.run_id}").status_code == 204
    assert usage == [usage[0]] * 4 and usage[0]["device_hours"] > 0, usage


def _is_imported_again(target: Settings, archive: Path) -> bool:
    try:
        return import_into(target, archive).added["runs"] == 1
    except SetupError as error:  # the deletion goes on
        assert "import again in a few minutes" in str(error)
        return False


def test_runs_that_have_not_ended_are_left_out_and_named(ended: Service, tmp_path: Path) -> None:
    with ThreadServer(ended.settings) as api, api.client_with(ended.key) as client:
        make_run(client, ended.dataset, name="waits")
    created = export(ended, tmp_path)
    assert created.selection.runs == {ended.run_id} and len(created.selection.live) == 1
    with pytest.raises(SetupError, match="None of these runs has ended"):
        export(ended, tmp_path, "waits.tar", runs=["waits"])
    make_experiment(ended.engine, "empty")
    with pytest.raises(SetupError, match="have no runs"):
        export(ended, tmp_path, "waits.tar", experiments=["empty"])
    assert not (tmp_path / "waits.tar").exists() and not list(tmp_path.glob(".waits*"))


def test_selected_run_comes_with_the_run_that_it_continues_and_without_others(
    ended: Service, target: Settings, tmp_path: Path
) -> None:
    with ThreadServer(ended.settings) as api, api.client_with(ended.key) as client:
        resumed = client.post(f"/v1/runs/{ended.run_id}/resume", json={})
        assert resumed.status_code == 202, resumed.text
        child = resumed.json()["id"]
        name = client.get(f"/v1/runs/{child}").json()["name"]
        other = client.post("/v1/datasets", files={"file": ("other.jsonl", ROWS + ROWS)}).json()["id"]
    Trainer(ended.engine, child).begin().complete()
    created = export(ended, tmp_path, runs=[child])
    assert created.selection.runs == {ended.run_id, child} and other not in created.selection.datasets
    assert import_into(target, created.path).added["runs"] == 2
    for options, sentence in (
        ({"runs": ["nobody"]}, "There is no run 'nobody': use an id or a whole name"),
        ({"experiments": ["nothing"]}, "There is no experiment 'nothing'"),
        ({"runs": [name]}, "is the name of 2 runs: use an id"),
    ):
        with pytest.raises(SetupError, match=sentence):
            export(ended, tmp_path, "none.tar", **options)


def test_statements_are_the_same_for_any_number_of_runs(ended: Service, target: Settings, tmp_path: Path) -> None:
    """One that names each run in a parameter of its own fails beyond 65,535 of them."""
    with recorded_statements() as for_one:
        import_into(target, export(ended, tmp_path, "one.tar").path)
        export(ended, tmp_path, "chosen.tar", experiments=["default"])
    with ThreadServer(ended.settings) as api, api.client_with(ended.key) as client:
        for number in range(3):
            rows = {"file": ("rows.jsonl", ROWS * (number + 2))}
            run = make_run(client, client.post("/v1/datasets", files=rows).json()["id"], name=f"run {number}")
            Trainer(ended.engine, run["id"]).begin().complete()
    with recorded_statements() as for_many:
        assert import_into(target, export(ended, tmp_path, "many.tar").path).added["runs"] == 3
        export(ended, tmp_path, "all-chosen.tar", experiments=["default"])
    assert for_many - for_one == set()


@contextmanager
def recorded_statements() -> Iterator[set[str]]:
    """Collect the texts of all statements that are executed meanwhile."""
    statements: set[str] = set()

    def record(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.add(statement)

    event.listen(Engine, "before_cursor_execute", record)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", record)


def test_id_that_belongs_to_something_else_is_a_conflict_and_nothing_is_imported(
    ended: Service, archive: Path, target: Settings
) -> None:
    import_into(target, archive)
    engine = sync_engine(target.database_url or "", pool_size=0)
    with engine.begin() as connection:
        connection.execute(update(Run).values(config=text("config || '{\"lora_r\": 3}'")))
    with pytest.raises(SetupError, match=rf"1 ids of the archive belong to something else .*{ended.run_id} \(runs\)"):
        import_into(target, archive)


def test_missing_file_of_the_service_is_named_by_both_commands(
    ended: Service, target: Settings, tmp_path: Path
) -> None:
    (ended.storage.checkpoint_dir(ended.run_id, 1, 5) / "weights").unlink()
    created = export(ended, tmp_path)
    imported = import_into(target, created.path)
    affected = [("checkpoint", ended.checkpoints[5])]
    assert [(it.kind, it.id) for it in created.problems] == [(it.kind, it.id) for it in imported.problems] == affected


def test_link_in_the_place_of_an_unfinished_archive_is_not_followed(ended: Service, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / ".linked.tar.partial").symlink_to(tmp_path / "victim")
    assert export(ended, tmp_path, "linked.tar").path.stat().st_size > 0
    assert (tmp_path / "victim").read_text() == "kept"


def test_import_that_is_interrupted_leaves_nothing_and_can_be_repeated(
    ended: Service, archive: Path, target: Settings
) -> None:
    def during(label: str) -> None:
        if label == "Writing to the database":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ImportJob(target, archive, Quiet(during)).run()
    assert not Storage(target).run_dir(ended.run_id).exists() and not list((target.storage_root / "staging").iterdir())
    assert import_into(target, archive).added["runs"] == 1


def test_import_whose_commit_was_answered_by_an_error_has_its_files_and_can_be_repeated(
    ended: Service, archive: Path, target: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Connection.commit

    def commit_and_lose_the_answer(connection: Connection) -> None:
        commit(connection)
        raise OperationalError("COMMIT", {}, Exception("server closed the connection unexpectedly"))

    with monkeypatch.context() as patched, pytest.raises(SetupError, match="import again"):
        patched.setattr(Connection, "commit", commit_and_lose_the_answer)
        import_into(target, archive)
    assert Storage(target).journal_path(ended.run_id).exists()
    again = import_into(target, archive)
    assert again.added["runs"] == 0 and again.problems == []


def test_import_for_which_the_disk_of_the_embedded_database_has_no_room_changes_nothing(
    archive: Path, target: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (target.home / "postgres").mkdir(parents=True)
    (target.home / "embedded.json").write_text(json.dumps({"database_url": target.database_url}))
    statvfs = os.statvfs

    def almost_full(path: Any) -> Any:
        almost = SimpleNamespace(f_files=0, f_blocks=2**30, f_bavail=64 * 2**20 // 4096, f_frsize=4096)
        return almost if Path(path) == target.home / "postgres" else statvfs(path)

    with monkeypatch.context() as patched, pytest.raises(SetupError, match="the disk of the database has only"):
        patched.setattr(os, "statvfs", almost_full)
        import_into(target, archive)
    assert not list((target.storage_root / "staging").iterdir())
    assert import_into(target, archive).added["runs"] == 1


def members_of(archive: Path) -> Members:
    with tarfile.open(archive) as tar:
        return {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]


def write(path: Path, members: Members) -> Path:
    """Write an archive whose digests are right, as its author can."""
    manifest = json.loads(members["anneal.json"])
    for name, table in manifest["tables"].items():
        content = members[f"rows/{name}.jsonl"]
        table.update(rows=content.count(b"\n"), sha256=sha256(content).hexdigest())
    manifest["inventory_sha256"] = sha256(members["files.jsonl"]).hexdigest()
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in {**members, "anneal.json": json.dumps(manifest).encode()}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def edit(member: str, /, **values: Any) -> Callable[[Members], None]:
    """Change columns of the first line of a member."""

    def change(members: Members) -> None:
        first, _, rest = members[member].partition(b"\n")
        row = json.loads(first)
        assert values.keys() <= row.keys()
        members[member] = json.dumps({**row, **values}).encode() + b"\n" + rest

    return change


def path_of_first_file(path: str) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        run = json.loads(members["rows/runs.jsonl"].partition(b"\n")[0])["id"]
        edit("files.jsonl", path=path.replace("RUN", run))(members)

    return change


def without_last_event(members: Members) -> None:
    members["rows/run_events.jsonl"] = b"\n".join(members["rows/run_events.jsonl"].split(b"\n")[:-2]) + b"\n"


def without_table(members: Members) -> bytes:
    manifest = json.loads(members["anneal.json"])
    del manifest["tables"]["run_actions"]
    return json.dumps(manifest).encode()


HOSTILE: dict[str, tuple[Callable[[Members], None], str]] = {
    "path above": (path_of_first_file("../../evil"), "list of files is not valid"),
    "absolute path": (path_of_first_file("/tmp/evil"), "list of files is not valid"),
    "path above within a run": (path_of_first_file("runs/RUN/../../evil"), "list of files is not valid"),
    "path beside": (path_of_first_file("cache/evil"), "belongs to no run or dataset"),
    "folder of a run": (path_of_first_file("runs/RUN"), "belongs to no run or dataset"),
    "other run": (path_of_first_file("runs/run_01k00000000000000000000000/x"), "belongs to no run or dataset"),
    "deep path": (path_of_first_file("runs/RUN/" + "a/" * 900 + "b"), "belongs to no run or dataset"),
    "long name": (path_of_first_file("runs/RUN/" + "a" * 300), "name too long"),
    "folder of all runs": (path_of_first_file("runs"), "belongs to no run or dataset"),
    "number as text": (edit("files.jsonl", mode="rwx"), "list of files is not valid"),
    "time": (edit("files.jsonl", mtime_ns=10**30), "list of files is not valid"),
    "nested entry": (lambda members: members.update({"files.jsonl": b"[" * 100_000 + b"\n"}), "list of files is not"),
    "other size": (edit("files.jsonl", bytes=10**15), "space beside ANNEAL_DISK_RESERVE_BYTES"),
    "other digest": (edit("files.jsonl", sha256="0" * 64), "has other contents"),
    "NUL": (path_of_first_file("runs/RUN/a\0b"), "list of files is not valid"),
    "extension": (edit("rows/datasets.jsonl", extension="/../../../evil"), "another file type"),
    "checkpoint": (edit("rows/checkpoints.jsonl", name="../../evil"), "another name"),
    "live run": (edit("rows/runs.jsonl", status="pending"), "has not ended"),
    "id": (edit("rows/runs.jsonl", id="run_../../evil"), "is no id"),
    "type": (edit("rows/runs.jsonl", lost_count="many"), "contradicts itself or this service"),
    "warnings": (edit("rows/runs.jsonl", warnings="x"), "warnings of a row of runs is not valid"),
    "method": (edit("rows/runs.jsonl", config={"method": "x", "base_model": "x"}), "config of a row of runs is not"),
    "time of a run": (
        edit("rows/runs.jsonl", started_at="294276-01-01T00:00:00Z"),
        "started_at of a row of runs is not",
    ),
    "preview": (edit("rows/datasets.jsonl", preview={}), "preview of a row of datasets is not valid"),
    "metrics": (edit("rows/checkpoints.jsonl", metrics=[1]), "metrics of a row of checkpoints is not valid"),
    "tags": (edit("rows/experiments.jsonl", tags=[1]), "tags of a row of experiments is not valid"),
    "event": (edit("rows/run_events.jsonl", data="x"), "data of a row of run_events is not valid"),
    "line": (edit("rows/run_events.jsonl", type="log", data={"line": 5}), "data of a row of run_events is not valid"),
    "type of an event": (edit("rows/run_events.jsonl", type="x\n"), "type of a row of run_events is not valid"),
    "lines left out": (
        edit("rows/run_events.jsonl", type="log", data={"line": "x", "left_out": "y"}),
        "data of a row of run_events is not valid",
    ),
    "step": (edit("rows/run_events.jsonl", type="metric", data={"step": 1.5}), "data of a row of run_events is not"),
    "loss": (
        edit("rows/run_events.jsonl", type="metric", data={"step": 1, "loss": 10**400}),
        "data of a row of run_events is not valid",
    ),
    "series": (edit("rows/metric_rollups.jsonl", series={"loss": [1]}), "series of a row of metric_rollups is not"),
    "points": (edit("rows/metric_rollups.jsonl", points=-1), "points of a row of metric_rollups is not valid"),
    "report": (edit("rows/run_attempts.jsonl", report={"memory": 5}), "report of a row of run_attempts is not valid"),
    "foreign row": (edit("rows/run_events.jsonl", run_id="run_x"), "belongs to no run of it"),
    "event missing": (without_last_event, "events of run_.* are missing"),
    "row": (lambda members: members.update({"rows/runs.jsonl": b"[" * 100_000 + b"\n"}), "a row of runs is not valid"),
    "columns": (
        lambda members: members.update({"anneal.json": members["anneal.json"].replace(b'"tags"', b'"tags\\" x"')}),
        "has other columns",
    ),
    "column twice": (
        lambda members: members.update({"anneal.json": members["anneal.json"].replace(b'"tags"', b'"tags", "tags"')}),
        "has other columns",
    ),
    "table missing": (lambda members: members.update({"anneal.json": without_table(members)}), "has other columns"),
    "later version": (
        lambda members: members.update({"anneal.json": members["anneal.json"].replace(b'"0', b'"9')}),
        "which is later than this version",
    ),
}


class TestHostileArchive:
    def test_hostile_archive_is_refused_with_the_reason_and_nothing_written(
        self, archive: Path, target: Settings, tmp_path: Path
    ) -> None:
        engine = sync_engine(target.database_url or "", pool_size=0)
        for case, (change, sentence) in HOSTILE.items():
            members = members_of(archive)
            change(members)
            try:
                import_into(target, write(tmp_path / "hostile.tar", members))
            except SetupError as error:
                assert re.search(sentence, str(error)), f"{case}: {error}"
            else:
                pytest.fail(f"{case} was imported")
            assert [path for path in target.storage_root.rglob("*") if path.name != "staging"] == [], case
            with engine.connect() as connection:
                assert list(connection.scalars(select(Run.id))) == [], case
            assert not list(tmp_path.rglob("evil")), case

    def test_member_that_no_export_writes_is_refused_before_it_is_read(self, target: Settings, tmp_path: Path) -> None:
        headers: tuple[dict[str, Any], ...] = (
            {"type": tarfile.SYMTYPE, "linkname": "/etc"},
            {"type": tarfile.GNUTYPE_SPARSE},
            {"type": tarfile.XHDTYPE},
            {"name": "../evil"},
            {"size": 10**15},
        )
        for header in headers:
            info = tarfile.TarInfo("files/00000000")
            for name, value in header.items():
                setattr(info, name, value)
            (tmp_path / "hostile.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
            with pytest.raises(SetupError, match="is not expected"):
                import_into(target, tmp_path / "hostile.tar")

    def test_file_that_is_cut_off_or_something_else_is_refused(
        self, archive: Path, target: Settings, tmp_path: Path
    ) -> None:
        content = archive.read_bytes()
        for cut in (content[: len(content) // 2], content[:100], b"", b"\x89PNG" * 1000):
            (tmp_path / "cut.tar").write_bytes(cut)
            with pytest.raises(SetupError, match="is damaged or not an archive"):
                import_into(target, tmp_path / "cut.tar")


def test_every_table_of_runs_is_in_the_archive_or_belongs_to_the_service_alone() -> None:
    own = {
        "deleted_attempts", "devices", "event_feed", "event_feed_queue", "ray_jobs", "replica_deletions",
        "run_deletions", "run_parts", "tokens", "webhook_deliveries",
    }  # fmt: skip
    of_runs = {name for name, table in all_models().tables.items() if "run_id" in table.columns or name == "runs"}
    assert of_runs - {table.name for table in TABLES} == own
