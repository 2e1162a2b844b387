"""The API with an object store as its storage: datasets, artifacts and checkpoints are there and nowhere else."""

import asyncio
import gzip
import hashlib
import io
import json
import os
import socket
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
from sqlalchemy import Engine, select, update

from anneal import Anneal
from anneal.contracts.attempt.records import is_record
from anneal.contracts.schemas.runs.placement import Resources
from anneal.contracts.training_config.fields import TrainingConfig
from app.config import Settings
from app.datasets import service
from app.infra.db import session_maker
from app.infra.files.object_store import INSTALLATION_MARK, MARK, WrongStore
from app.infra.storage import Storage
from app.runs.creating.validation.resources import shared_file_problems
from app.runs.state import deletion
from app.tables.administration.installation import Installation
from app.tables.checkpoints import Checkpoint, ReplicaDeletion
from app.tables.datasets import Dataset
from app.tables.runs import Attempt
from tests.factories import Trainer, make_dataset, make_run
from tests.server import ApiServer, ThreadServer
from tests.slowness import slowness
from tests.waiting import eventually
from worker.checkpoint_files import manifest
from worker.checkpoint_store.remote_store import RemoteStore

RANGES = ["bytes=0-", "bytes=600-", "bytes=0-99", "bytes=-5", "bytes=0-1,10-12"]
ROWS = b"".join(b'{"text": "row %d"}\n' % number for number in range(200))


@pytest.fixture
def share(tmp_path: Path) -> Path:
    (tmp_path / "share").mkdir()
    return tmp_path / "share"


@pytest.fixture
def stored(settings: Settings, share: Path) -> Iterator[ApiServer]:
    """The API on a store."""
    changed = Settings(**{**settings.model_dump(), "storage": f"file://{share}"})
    with ThreadServer(changed) as server:
        yield server


def upload(api: ApiServer, content: bytes = ROWS) -> dict[str, Any]:
    answer = api.client.post("/v1/datasets", files={"file": ("rows.jsonl", content)})
    assert answer.status_code == 201, answer.text
    created: dict[str, Any] = answer.json()
    return created


def test_a_plugin_whose_files_other_hosts_would_read_is_refused_on_several(stored: ApiServer) -> None:
    extra = {"data_source": {"type": "rows"}, "checkpoint_engine": {"type": "copies"}}
    config = TrainingConfig.model_validate({"base_model": "any", "method": "sft", "extra": extra})

    def refused(hosts: int) -> set[str]:
        problems = shared_file_problems(stored.settings, config, Resources(devices=2, hosts=hosts))
        return {one.field for one in problems if one.code == "not_supported"}

    assert refused(2) == {"config.extra.data_source", "config.extra.checkpoint_engine"}
    assert refused(1) == set()


class TestADataset:
    def test_dataset_is_stored_in_and_read_from_the_object_store(self, stored: ApiServer, share: Path) -> None:
        dataset = upload(stored)
        file = share / "datasets" / dataset["id"] / "data.jsonl"
        assert hashlib.sha256(file.read_bytes()).hexdigest() == dataset["sha256"]
        assert [path for path in stored.settings.storage_root.rglob("*") if path.is_file()] == []
        path = f"/v1/datasets/{dataset['id']}"
        content = stored.client.get(f"{path}/content")
        assert content.content == ROWS and content.headers["etag"] == f'"{dataset["sha256"]}"'
        part = stored.client.get(f"{path}/content", headers={"Range": "bytes=3-9"})
        assert (part.status_code, part.content) == (206, ROWS[3:10])
        several = stored.client.get(f"{path}/content", headers={"Range": "bytes=0-1,10-12"})
        assert several.status_code == 206 and ROWS[10:13] in several.content
        for wrong, status in (("bytes=99999-", 416), ("rows=1-2", 400)):
            refused = stored.client.get(f"{path}/content", headers={"Range": wrong})
            assert (refused.status_code, refused.headers["content-type"]) == (status, "application/problem+json")
        page = stored.client.get(f"{path}/rows", params={"limit": 3}).json()
        after = stored.client.get(f"{path}/rows", params={"limit": 3, "after": page["next"]}).json()
        assert [one["line"] for one in (*page["data"], *after["data"])] == [1, 2, 3, 4, 5, 6]

    def test_dataset_is_mixed_from_others_in_the_store(self, stored: ApiServer) -> None:
        ids = [upload(stored)["id"], upload(stored, b'{"text": "other"}\n')["id"]]
        mixed = stored.client.post(
            "/v1/datasets/mix", json={"name": "m", "sources": [{"dataset_id": id} for id in ids]}
        )
        assert mixed.status_code == 201, mixed.text
        content = stored.client.get(f"/v1/datasets/{mixed.json()['id']}/content").content
        assert content == ROWS + b'{"text": "other"}\n'

    def test_mix_fetches_each_dataset_once_verified_and_if_the_disk_has_room(
        self, stored: ApiServer, share: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset, opened, open_dataset = upload(stored)["id"], [], Storage.open_dataset

        def counted(self: Storage, id: str, extension: str) -> Any:
            opened.append(id)
            return open_dataset(self, id, extension)

        monkeypatch.setattr(Storage, "open_dataset", counted)
        body = {"name": "m", "sources": [{"dataset_id": dataset}] * 3}
        answer = stored.client.post("/v1/datasets/mix", json=body)
        assert (answer.status_code, answer.json().get("rows"), opened) == (201, 600, [dataset]), answer.text
        with (share / "datasets" / dataset / "data.jsonl").open("ab") as file:
            file.write(b'{"text": "more"}\n')
        answer = stored.client.post("/v1/datasets/mix", json=body)
        assert (answer.status_code, answer.json()["code"]) == (409, "content_corrupt")
        monkeypatch.setattr("app.infra.files.disk_space.free_bytes", lambda _: 2**30)
        assert stored.client.post("/v1/datasets/mix", json=body).status_code == 507
        assert opened == [dataset] * 2

    @pytest.mark.parametrize("is_compared_before", [True, False])
    def test_no_part_of_a_dataset_that_was_changed_in_the_store_is_sent(
        self, stored: ApiServer, share: Path, is_compared_before: bool
    ) -> None:
        dataset = upload(stored)["id"]
        path, file = f"/v1/datasets/{dataset}", share / "datasets" / dataset / "data.jsonl"
        right = file.read_bytes()
        if is_compared_before:
            assert stored.client.get(f"{path}/content", headers={"Range": "bytes=600-"}).content == right[600:]
        changed = [
            right[:-2] + bytes([right[-2] ^ 1]) + right[-1:],
            right.replace(b"row 100", b"row 9"),
            bytes(len(right)),
            b"<html>",
            b"",
        ]
        for content in changed:
            file.write_bytes(content)
            for call, range_ in [("rows", None), ("content", None), *(("content", range_) for range_ in RANGES)]:
                answer = stored.client.get(f"{path}/{call}", headers={} if range_ is None else {"Range": range_})
                assert (answer.status_code, answer.json()["code"]) == (409, "content_corrupt"), (call, range_)
        file.write_bytes(right)
        assert stored.client.get(f"{path}/content", headers={"Range": "bytes=5-"}).content == right[5:]
        assert stored.client.get(f"{path}/rows").json()["data"][1]["row"] == {"text": "row 1"}

    def test_large_dataset_that_was_changed_in_the_store_is_cut_off_with_a_sentence_in_the_log(
        self, stored: ApiServer, share: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("app.api.file_response.COMPARED_FIRST_BYTES", 2**20)
        rows = b"".join(b'{"text": "%d %s"}\n' % (number, b"x" * 100_000) for number in range(25))
        dataset = upload(stored, rows)["id"]
        path, file = f"/v1/datasets/{dataset}/content", share / "datasets" / dataset / "data.jsonl"
        right = file.read_bytes()
        for is_compared_before in (False, True):
            file.write_bytes(right)
            if is_compared_before:
                assert stored.client.get(path).content == right
            file.write_bytes(right[:-9] + b"?" + right[-8:])
            caplog.clear()
            with pytest.raises(httpx.RemoteProtocolError):
                stored.client.get(path)
            (line,) = [record for record in caplog.records if record.levelno >= 30]
            assert line.exc_info is None and "was cut off before its end" in line.getMessage()
            assert f"{stored.settings.storage_url}/datasets/{dataset}/data.jsonl" in line.getMessage()
            assert "upload it again, or restore the storage" in line.getMessage()
        answer = stored.client.get(path, headers={"Range": f"bytes={2**20 + 5}-{2**20 + 9}"})
        assert (answer.status_code, answer.content) == (206, right[2**20 + 5 : 2**20 + 10]), "this piece is right"

    def test_dataset_is_deleted_from_the_store_with_its_row(self, stored: ApiServer, share: Path) -> None:
        dataset = upload(stored)
        assert stored.client.delete(f"/v1/datasets/{dataset['id']}").status_code == 204
        eventually(lambda: "data.jsonl" not in [name for _, _, files in os.walk(share / "datasets") for name in files])

    async def test_dataset_without_a_row_is_moved_aside_and_later_removed(
        self, stored: ApiServer, engine: Engine
    ) -> None:
        known, orphan = upload(stored)["id"], upload(stored)["id"]
        with engine.begin() as connection:
            connection.execute(Dataset.__table__.delete().where(Dataset.id == orphan))
        storage = Storage.shared(stored.settings)
        assert storage.objects is not None
        sessions = session_maker(stored_engine(stored))
        assert await service.sweep_orphans(sessions, storage, older_than_seconds=0) == 1
        assert [one.key.split("/")[1] for one in storage.objects.list("datasets")] == [known]
        assert [one.key.split("/")[1].split("-")[0] for one in storage.objects.list("aside")] == [orphan]
        storage.sweep_aside(0)
        assert storage.objects.list("aside") == []


def stored_engine(api: ApiServer) -> Any:
    from app.infra.db import async_engine

    return async_engine(api.settings.database_url or "")


class TestAnOutage:
    def test_store_outage_is_503_with_retry_after_and_leaves_no_row(
        self, stored: ApiServer, share: Path, engine: Engine
    ) -> None:
        dataset = upload(stored)
        share.rename(share.with_name("away"))
        answers = [
            stored.client.post("/v1/datasets", files={"file": ("rows.jsonl", ROWS)}),
            stored.client.get(f"/v1/datasets/{dataset['id']}/content"),
            stored.client.get(f"/v1/datasets/{dataset['id']}/rows"),
        ]
        for answer in answers:
            assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
            assert int(answer.headers["retry-after"]) > 0
        with engine.connect() as connection:
            assert connection.scalars(select(Dataset.id)).all() == [dataset["id"]]
        share.with_name("away").rename(share)
        assert stored.client.get(f"/v1/datasets/{dataset['id']}/content").content == ROWS

    def test_a_share_without_its_mark_is_not_taken_for_a_new_one(self, stored: ApiServer, share: Path) -> None:
        upload(stored)
        (share / MARK).unlink()
        assert stored.client.post("/v1/datasets", files={"file": ("rows.jsonl", ROWS)}).status_code == 503


class TestASilentStore:
    """It takes connections, or opens, and never answers: here, each read of a file waits for a writer that is none."""

    def test_silent_store_blocks_no_other_request(
        self, settings: Settings, share: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("app.infra.storage._CALL_SECONDS", 1.5)
        with ThreadServer(Settings(**{**settings.model_dump(), "storage": f"file://{share}"})) as api:
            dataset = upload(api)["id"]
            file = share / "datasets" / dataset / "data.jsonl"
            file.unlink()
            os.mkfifo(file)
            base = Trainer(engine, make_run(api.client, dataset)["id"]).begin().complete().run_id
            (share / "runs" / base / "a1").mkdir(parents=True)
            os.mkfifo(share / "runs" / base / "a1" / "output.manifest.json")
            try:
                check_a_silent_store(api, dataset, base)
            finally:
                for pipe in (file, share / "runs" / base / "a1" / "output.manifest.json"):
                    with suppress(OSError):  # no thread reads it
                        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))

    @pytest.mark.full
    def test_silent_s3_blocks_no_other_request(
        self, settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        with socket.create_server(("127.0.0.1", 0), backlog=200) as silent:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            with ThreadServer(Settings(**{**settings.model_dump(), "storage": "s3://silent/prefix"})) as api:
                dataset = make_dataset(engine)
                base = Trainer(engine, make_run(api.client, dataset)["id"]).begin().complete().run_id
                check_a_silent_store(api, dataset, base)


def check_a_silent_store(api: ApiServer, dataset: str, base: str) -> None:
    """Send more requests that need the store than there are threads, and connections to the database."""
    body = {"dataset_id": dataset, "backend": "celery", "config": {"base_model": base}}
    needing = [
        lambda: api.client.get(f"/v1/datasets/{dataset}/content"),
        lambda: api.client.get(f"/v1/datasets/{dataset}/rows"),
        lambda: api.client.get(f"/v1/runs/{base}/artifacts"),
        lambda: api.client.get(f"/v1/runs/{base}/artifacts.tar"),
        lambda: api.client.post("/v1/runs/validate", json=body),
    ]
    other = {"dataset_id": dataset, "backend": "fake", "config": {"base_model": "any"}}
    with ThreadPoolExecutor(60) as pool:
        sent = [pool.submit(needing[number % len(needing)]) for number in range(60)]
        took = []
        while not all(one.done() for one in sent):
            for send in (
                lambda: api.client.get("/v1/runs"),
                lambda: api.client.get(f"/v1/datasets/{dataset}"),
                lambda: api.client.post("/v1/runs/validate", json=other),
                lambda: api.client.get("/v1/models"),
            ):
                began = time.monotonic()
                assert send().status_code == 200
                took.append(time.monotonic() - began)
        answers = [one.result() for one in sent]
    codes = Counter((answer.status_code, answer.json()["code"]) for answer in answers)
    # Downloads are limited for each key, too.
    assert {*codes} - {(429, "too_many_downloads")} == {(503, "storage_unavailable"), (503, "storage_busy")}, codes
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)
    assert len(took) >= 4 and max(took) < 3 * slowness(), sorted(took)[-5:]


class TestAStoreOfAnotherInstallation:
    def test_store_of_another_installation_is_neither_written_nor_swept(
        self, stored: ApiServer, share: Path, engine: Engine
    ) -> None:
        mark = share / INSTALLATION_MARK
        own = eventually(lambda: mark.exists() and mark.read_text())
        with engine.connect() as connection:
            assert own == connection.scalar(select(Installation.id))
        dataset = upload(stored)["id"]
        with engine.begin() as connection:  # as if this were a service with an empty database
            connection.execute(Dataset.__table__.delete())
            connection.execute(update(Installation).values(id="ins_other"))
        answer = stored.client.post("/v1/datasets", files={"file": ("rows.jsonl", ROWS)})
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
        assert "belongs to another installation" in answer.json()["detail"]
        with pytest.raises(WrongStore):
            asyncio.run(swept(stored))
        assert (share / "datasets" / dataset / "data.jsonl").exists() and mark.read_text() == own

    def test_a_store_without_mark_is_ours_if_it_has_the_newest_dataset(self, stored: ApiServer, share: Path) -> None:
        dataset = upload(stored)["id"]
        mark = share / INSTALLATION_MARK
        mark.unlink()
        asyncio.run(swept(stored))
        assert mark.exists()
        mark.unlink()
        (share / "datasets" / dataset).rename(share / "elsewhere")
        with pytest.raises(WrongStore, match="has no file"):
            asyncio.run(swept(stored))
        assert not mark.exists()


async def swept(api: ApiServer) -> None:
    engine = stored_engine(api)
    try:
        await service.sweep_orphans(session_maker(engine), Storage.shared(api.settings), older_than_seconds=0)
    finally:
        await engine.dispose()


class Done:
    """A completed run whose output, records and checkpoint a worker has sent."""

    def __init__(self, api: ApiServer, engine: Engine, home: Path) -> None:
        upload(api)  # marks the store
        local = Storage(Settings(**{**api.settings.model_dump(), "home": home, "cache": home / "cache"}))
        self.remote = RemoteStore(api.settings.storage_url or "", local)
        self.trainer = Trainer(engine, make_run(api.client, make_dataset(engine))["id"]).begin()
        self.id, of = self.trainer.run_id, (self.trainer.run_id, 1)
        checkpoint = local.checkpoint_dir(*of, 5)
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_bytes(b"w" * 3000)
        digest = manifest.write_manifest(checkpoint, 5, {})
        self.checkpoint = self.trainer.checkpoint(5, manifest_sha256=digest)
        output = local.output_dir(*of)
        (output / "deep").mkdir(parents=True)
        self.files = {"adapter_config.json": b"{}", "deep/weights.safetensors": bytes(range(256)) * 40, "empty": b""}
        for name, content in self.files.items():
            (output / name).write_bytes(content)
        (output / "link").symlink_to("/etc/passwd")
        (output / "bad\x1b[2Jname").write_bytes(b"x")
        (local.attempt_dir(*of) / "metrics.jsonl").write_text("{}\n")
        head = b"2026-01-02T03:04:05.678Z stdout info "
        self.log = head + b"a line\n" + b"".join(head + os.urandom(4000).hex().encode() + b"\n" for _ in range(100))
        (local.attempt_dir(*of) / "log.txt.gz").write_bytes(gzip.compress(self.log, 1))
        self.trainer.events("log", {"line": "…", "stream": "stderr", "level": "warning", "left_out": 1})
        (local.attempt_dir(*of) / "job.json").write_text("not a record")

        def always(_: str) -> bool:
            return True

        sent = self.remote.send_described(output, local.output_manifest(*of), always, {}, lambda: None)
        records = self.remote.send_described(
            local.attempt_dir(*of), local.records_manifest(*of), is_record, {}, lambda: None
        )
        self.remote.send_checkpoint(checkpoint, digest, lambda: None)
        self.trainer.complete()
        with engine.begin() as connection:
            values = {"output_sha256": sent, "records_sha256": records}
            connection.execute(update(Attempt).where(Attempt.run_id == self.id).values(**values))


@pytest.fixture
def done(stored: ApiServer, engine: Engine, tmp_path: Path) -> Done:
    return Done(stored, engine, tmp_path / "worker")


class TestAnOutput:
    def test_output_is_listed_and_downloaded_from_the_store(self, stored: ApiServer, done: Done) -> None:
        path = f"/v1/runs/{done.id}/artifacts"
        listed = stored.client.get(path).json()
        assert listed["left_out"] == 1, "a name that would control a terminal is not sent"
        assert {one["path"]: one["bytes"] for one in listed["data"]} == {k: len(v) for k, v in done.files.items()}
        for name, content in done.files.items():
            assert stored.client.get(f"{path}/{name}").content == content
        part = stored.client.get(f"{path}/deep/weights.safetensors", headers={"Range": "bytes=-5"})
        assert (part.status_code, part.content) == (206, done.files["deep/weights.safetensors"][-5:])
        archive = stored.client.get(f"{path}.tar")
        assert len(archive.content) == int(archive.headers["content-length"])
        with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
            contents = {one.name.removeprefix(f"{done.id}/"): tar.extractfile(one).read() for one in tar.getmembers()}  # type: ignore[union-attr]
        assert contents == done.files
        assert stored.client.get(f"/v1/runs/{done.id}").json()["fine_tuned_model"] == (
            f"{stored.settings.storage_url}/runs/{done.id}/a1/output"
        )

    @pytest.mark.parametrize("name", ["../metrics.jsonl", "..%2F..%2Fa1%2Fjob.json", "%2Fetc%2Fpasswd", "link", "x"])
    def test_output_path_reaches_no_other_file(self, stored: ApiServer, done: Done, name: str) -> None:
        assert stored.client.get(f"/v1/runs/{done.id}/artifacts/{name}").status_code == 404

    def test_output_with_a_changed_manifest_is_refused(self, stored: ApiServer, done: Done, share: Path) -> None:
        file = share / "runs" / done.id / "a1" / "output.manifest.json"
        listed = json.loads(file.read_bytes())
        listed["files"]["../../../datasets"] = {"bytes": 1, "sha256": "0" * 64}
        file.write_text(json.dumps(listed))
        answer = stored.client.get(f"/v1/runs/{done.id}/artifacts")
        assert (answer.status_code, answer.json()["code"]) == (409, "artifacts_corrupt")

    def test_output_with_a_changed_file_size_is_refused(self, stored: ApiServer, done: Done, share: Path) -> None:
        with (share / "runs" / done.id / "a1" / "output" / "deep" / "weights.safetensors").open("ab") as file:
            file.write(b"more")
        answer = stored.client.get(f"/v1/runs/{done.id}/artifacts/deep/weights.safetensors")
        assert (answer.status_code, answer.json()["code"]) == (409, "artifacts_corrupt")

    def test_output_with_changed_content_is_never_sent_as_a_complete_file_or_archive(
        self,
        stored: ApiServer,
        done: Done,
        share: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        path, file = f"/v1/runs/{done.id}/artifacts", share / "runs" / done.id / "a1" / "output" / "deep"
        file /= "weights.safetensors"
        content = file.read_bytes()
        etag = stored.client.get(f"{path}/deep/weights.safetensors").headers["etag"]
        assert etag == f'"{hashlib.sha256(content).hexdigest()}"'
        file.write_bytes(content[:-1] + b"?")
        for name in (f"{path}.tar", f"{path}/deep/weights.safetensors"):
            for range_ in RANGES:
                answer = stored.client.get(name, headers={"Range": range_})
                assert (answer.status_code, answer.json()["code"]) == (409, "artifacts_corrupt"), (name, range_)
        for module in ("app.api.file_response", "app.runs.state.artifacts.folders"):
            monkeypatch.setattr(f"{module}.COMPARED_FIRST_BYTES", 0)
        caplog.clear()
        with pytest.raises(httpx.RemoteProtocolError):
            stored.client.get(f"{path}.tar")
        (line,) = [record for record in caplog.records if record.levelno >= 30]
        assert line.exc_info is None and f"the archive of {done.id} from {stored.settings.storage_url}" in line.message

    @pytest.mark.parametrize("part", [bytes(range(256)) * 2, b"?" * 512])
    def test_download_is_resumed_and_is_right_even_if_its_beginning_was_wrong(
        self, stored: ApiServer, done: Done, tmp_path: Path, part: bytes
    ) -> None:
        begun = tmp_path / "model" / f".{done.id}.part" / "deep" / "weights.safetensors"
        begun.parent.mkdir(parents=True)
        begun.write_bytes(part)
        with Anneal(stored.url, stored.key) as client:
            folder = client.runs.download(done.id, tmp_path / "model")
        assert {name: (folder / name).read_bytes() for name in done.files} == done.files

    def test_output_during_a_store_outage_is_503(self, stored: ApiServer, done: Done, share: Path) -> None:
        share.rename(share.with_name("away"))
        for path in ("artifacts", "artifacts.tar", "artifacts/empty", "attempts/1/artifacts"):
            assert stored.client.get(f"/v1/runs/{done.id}/{path}").status_code == 503

    def test_records_of_an_attempt_are_served_from_the_store(self, stored: ApiServer, done: Done) -> None:
        path = f"/v1/runs/{done.id}/attempts/1/artifacts"
        listed = [one["path"] for one in stored.client.get(path).json()["data"]]
        assert listed == ["log.txt.gz", "metrics.jsonl"]
        complete = stored.client.get(f"/v1/runs/{done.id}/logs/complete")
        assert complete.content == done.log
        assert stored.client.get(f"{path}/metrics.jsonl").text == "{}\n"
        assert stored.client.get(f"{path}/job.json").status_code == 404

    def test_complete_log_that_was_changed_in_the_store_is_refused_and_none_of_its_lines_are_hits(
        self, stored: ApiServer, done: Done, share: Path, engine: Engine
    ) -> None:
        file, path = share / "runs" / done.id / "a1" / "log.txt.gz", f"/v1/runs/{done.id}/logs"
        search = stored.client.get(f"{path}/search", params={"q": "a line"}).json()["complete"][0]
        assert (search["matches"], search["problem"]) == (1, None)
        content = file.read_bytes()
        assert len(content) > 300_000, "the line is in another piece than the end"
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for part in ({}, {"grep": "a line"}, {"attempt": 1}):
            answer = stored.client.get(f"{path}/complete", params=part)
            assert (answer.status_code, answer.json()["code"]) == (409, "artifacts_corrupt")
        search = stored.client.get(f"{path}/search", params={"q": "a line"}).json()["complete"][0]
        assert search["data"] == [] and "is not what was stored" in search["problem"]

    def test_a_checkpoint_is_downloaded_once_it_is_sent(self, stored: ApiServer, done: Done, engine: Engine) -> None:
        path = f"/v1/runs/{done.id}/checkpoints/{done.checkpoint}/download"
        answer = stored.client.get(path)
        assert (answer.status_code, answer.json()["code"]) == (409, "checkpoint_not_stored")
        with engine.begin() as connection:
            now = select(Attempt.started_at).limit(1).scalar_subquery()
            connection.execute(update(Checkpoint).values(replicated_at=now))
        with tarfile.open(fileobj=io.BytesIO(stored.client.get(path).content)) as tar:
            assert sorted(name.split("/")[1] for name in tar.getnames()) == ["manifest.json", "weights"]

    async def test_output_is_deleted_from_the_store_with_its_run(
        self, stored: ApiServer, done: Done, share: Path, engine: Engine
    ) -> None:
        assert stored.client.delete(f"/v1/runs/{done.id}").status_code == 204
        sessions = session_maker(stored_engine(stored))
        await deletion.delete_remaining_data(sessions, Storage.shared(stored.settings))
        # The API may be doing it already. Unlike `rglob`, `walk` takes folders that vanish meanwhile.
        eventually(lambda: not [name for _, _, files in os.walk(share / "runs") for name in files])

        def is_removed_again() -> bool:
            with engine.connect() as connection:
                return connection.scalar(select(ReplicaDeletion.run_id)) == done.id

        eventually(is_removed_again, what="a second removal of what a worker may still send")
