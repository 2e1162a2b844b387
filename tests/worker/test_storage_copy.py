"""`anneal storage copy`: a service that had a folder goes on with an object store, and misses nothing."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, select, update

from app.config import Settings
from app.infra.errors import SetupError
from app.infra.files.object_store import INSTALLATION_MARK
from app.infra.storage import Storage
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Attempt
from app.tables.workers import Worker
from tests.factories import Trainer, make_run
from tests.rows import add_worker
from tests.server import ThreadServer
from worker.checkpoint_files import manifest
from worker.checkpoint_store.remote_store import RemoteStore
from worker.storage_copy import StorageCopy

ROWS = b'{"text": "a row"}\n' * 50


class Service:
    """A service with a dataset, and a run with two checkpoints, an output and records."""

    def __init__(self, settings: Settings, engine: Engine, share: Path) -> None:
        self.settings, self.engine, self.url = settings, engine, f"file://{share}"
        with ThreadServer(settings) as api:
            self.dataset = api.client.post("/v1/datasets", files={"file": ("rows.jsonl", ROWS)}).json()["id"]
            trainer = Trainer(engine, make_run(api.client, self.dataset)["id"]).begin()
        self.run_id, storage = trainer.run_id, Storage(settings)
        self.checkpoints = {}
        for step in (5, 10):
            folder = storage.checkpoint_dir(self.run_id, 1, step)
            folder.mkdir(parents=True)
            (folder / "weights").write_bytes(bytes([step]) * 3000)
            self.checkpoints[trainer.checkpoint(step, manifest_sha256=manifest.write_manifest(folder, step, {}))] = step
        (storage.attempt_dir(self.run_id, 1) / "metrics.jsonl").write_text("{}\n")
        (storage.output_dir(self.run_id, 1) / "deep").mkdir(parents=True)
        (storage.output_dir(self.run_id, 1) / "deep" / "weights").write_bytes(b"w" * 5000)
        trainer.complete()
        with engine.begin() as connection:
            connection.execute(update(Worker).values(state="offline"))

    def copied(self) -> StorageCopy:
        copy = StorageCopy(self.settings, self.engine, self.url)
        copy.copy_everything()
        return copy


@pytest.fixture
def share(tmp_path: Path) -> Path:
    (tmp_path / "share").mkdir()
    return tmp_path / "share"


@pytest.fixture
def service(settings: Settings, engine: Engine, share: Path) -> Iterator[Service]:
    yield Service(settings, engine, share)


def test_everything_is_there_and_the_service_goes_on_with_it(service: Service, share: Path) -> None:
    assert service.copied().copied == {"datasets": 1, "checkpoints": 2, "attempts": 1}
    again = service.copied()
    assert again.copied.total() == 4 and again.missing == []
    Storage(service.settings).remove_run(service.run_id)
    Storage(service.settings).remove_dataset(service.dataset)
    with ThreadServer(Settings(**{**service.settings.model_dump(), "storage": service.url})) as api:
        assert api.client.get(f"/v1/datasets/{service.dataset}/content").content == ROWS
        path = f"/v1/runs/{service.run_id}"
        assert api.client.get(f"{path}/artifacts/deep/weights").content == b"w" * 5000
        assert api.client.get(f"{path}/attempts/1/artifacts/metrics.jsonl").text == "{}\n"
        for checkpoint, step in service.checkpoints.items():
            assert bytes([step]) * 3000 in api.client.get(f"{path}/checkpoints/{checkpoint}/download").content
        assert api.client.post("/v1/datasets", files={"file": ("more.jsonl", ROWS)}).status_code == 201
    with service.engine.connect() as connection:
        sha256 = connection.scalar(select(Checkpoint.manifest_sha256).where(Checkpoint.step == 10))
    fetching = Storage(Settings(**{**service.settings.model_dump(), "home": share / "w", "storage": service.url}))
    place = fetching.checkpoint_dir(service.run_id, 1, 10)
    place.parent.parent.mkdir(parents=True)
    RemoteStore(service.url, fetching).fetch_checkpoint(place, str(sha256), "wrk", lambda: None)
    assert manifest.verify(place, str(sha256)) == []


def test_dataset_that_differs_in_the_store_is_sent_again(service: Service, share: Path) -> None:
    service.copied()
    file = share / "datasets" / service.dataset / "data.jsonl"
    for content in (b"?" * len(ROWS), ROWS[:-1], ROWS + b"more"):
        file.write_bytes(content)
        assert service.copied().missing == [] and file.read_bytes() == ROWS


def test_uploaded_file_beside_the_rows_is_copied_and_named_if_it_is_damaged(service: Service, share: Path) -> None:
    pair = b'{"input": {"messages": [{"role": "user", "content": "a"}]}, "preferred_output": [{"role": "assistant", '
    pair += b'"content": "b"}], "non_preferred_output": [{"role": "assistant", "content": "c"}]}\n'
    with ThreadServer(service.settings) as api:
        parts = {"file": ("pairs.jsonl", pair), "purpose": (None, "fine-tune")}
        file_id = api.client.post("/openai/v1/files", files=parts).raise_for_status().json()["id"]
    dataset_id = file_id.replace("file-", "ds_")
    assert service.copied().missing == []
    assert (share / "datasets" / dataset_id / "data.original").read_bytes() == pair
    shutil.rmtree(share)
    share.mkdir()
    Storage(service.settings).dataset_file(dataset_id, "original").write_bytes(b"x")
    assert service.copied().missing == [dataset_id]


def test_each_host_with_a_storage_of_its_own_adds_what_the_store_lacks_and_changes_nothing_else(
    service: Service, share: Path, tmp_path: Path
) -> None:
    first, own = Storage(service.settings), tmp_path / "second"
    second = Settings(**{**service.settings.model_dump(), "storage": own})
    remote = RemoteStore(service.url, first)
    remote.objects.mark_root()
    with service.engine.connect() as connection:
        (sent, other) = connection.execute(select(Checkpoint.__table__).order_by(Checkpoint.step)).all()
    remote.send_checkpoint(first.checkpoint_dir(service.run_id, 1, 5), sent.manifest_sha256, lambda: None)
    shutil.rmtree(first.checkpoint_dir(service.run_id, 1, 5))
    (own / "runs" / service.run_id / "a1").mkdir(parents=True)
    first.checkpoint_dir(service.run_id, 1, 10).rename(Storage(second).checkpoint_dir(service.run_id, 1, 10))
    copy = service.copied()
    assert copy.copied["checkpoints"] == 1 and copy.missing == [other.id]
    stored = {path: path.read_bytes() for path in share.rglob("*") if path.is_file()}
    copy = StorageCopy(second, service.engine, service.url)
    copy.copy_everything()
    assert copy.copied["checkpoints"] == 2 and copy.missing == []
    added = {path for path in share.rglob("*") if path.is_file()} - stored.keys()
    assert {path.parent.name for path in added} == {"checkpoint-10"}
    assert {path: path.read_bytes() for path in stored} == stored
    with service.engine.connect() as connection:
        assert None not in connection.scalars(select(Checkpoint.replicated_at)).all()


def test_damaged_files_are_named_and_the_others_copied(service: Service) -> None:
    storage = Storage(service.settings)
    (storage.checkpoint_dir(service.run_id, 1, 5) / "weights").write_bytes(b"other")
    storage.dataset_file(service.dataset, "jsonl").write_bytes(b"x")
    copy = service.copied()
    (damaged,) = (id for id, step in service.checkpoints.items() if step == 5)
    assert sorted(copy.missing) == sorted([damaged, service.dataset])
    with service.engine.connect() as connection:
        assert connection.scalars(select(Checkpoint.step).where(Checkpoint.replicated_at.is_not(None))).all() == [10]
        assert connection.scalar(select(Attempt.output_sha256)) is not None
    assert not list(Path(service.url.removeprefix("file://")).rglob("data.jsonl"))


def test_interrupted_copy_is_not_taken_for_a_complete_one(
    service: Service, share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "send_described", fails)
        with pytest.raises(KeyboardInterrupt):
            service.copied()
    assert not (share / INSTALLATION_MARK).exists()
    assert service.copied().missing == [] and (share / INSTALLATION_MARK).exists()


def test_it_is_refused_while_the_service_runs_or_for_the_store_of_another_one(service: Service, share: Path) -> None:
    worker = add_worker(service.engine)
    with pytest.raises(SetupError, match="drain all workers"):
        service.copied()
    with service.engine.begin() as connection:
        connection.execute(update(Worker).where(Worker.id == worker).values(state="offline"))
    (share / INSTALLATION_MARK).write_text("ins_other")
    done = subprocess.run(
        [sys.executable, "-m", "app.cli.main", "storage", "copy", service.url],
        env=service.settings.child_environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "belongs to another installation" in done.stderr
    assert [path.name for path in share.iterdir() if path.is_dir()] == []
