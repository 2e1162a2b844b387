"""Promises about datasets that are there: fetched back, filtered, deleted, and made once for each idempotency key."""

import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, delete, event, insert

from app.config import Settings
from app.infra.db import sync_engine
from app.infra.ids import new_id
from app.infra.storage import Storage
from app.tables.datasets import Dataset, DatasetIdempotencyKey
from tests.app.uploads import lines, upload
from tests.factories import make_dataset, make_run
from tests.server import ApiServer, ThreadServer
from tests.waiting import eventually

CONTENT = lines(*({"text": f"row {n} " + "x" * 100} for n in range(2000)))


def _made(api: ApiServer, content: bytes = CONTENT, name: str = "data.jsonl", **more: Any) -> str:
    answer = upload(api, content, name, **more)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def _files(settings: Settings) -> list[Path]:
    return [path for path in settings.storage_root.rglob("*") if path.is_file()]


@pytest.fixture
def emptied(emptied_api: ApiServer) -> Iterator[ApiServer]:
    """The API of the file, without datasets and their files."""
    yield emptied_api
    for folder in (emptied_api.settings.storage_root / "datasets").iterdir():
        shutil.rmtree(folder, ignore_errors=True)  # the API may still remove the files of a deleted one


@pytest.fixture
def engine(settings: Settings) -> Engine:
    return sync_engine(settings.database_url or "", pool_size=0)


class TestContent:
    def test_content_is_returned_as_stored(self, emptied: ApiServer) -> None:
        id = _made(emptied, name="my “data”.v2.csv", file_format="jsonl")
        answer = emptied.client.get(f"/v1/datasets/{id}/content")
        assert (answer.status_code, answer.content) == (200, CONTENT)
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.headers["etag"] == f'"{hashlib.sha256(CONTENT).hexdigest()}"'
        assert answer.headers["content-length"] == str(len(CONTENT))
        assert answer.headers["content-disposition"] == (
            "attachment; filename*=utf-8''my%20%E2%80%9Cdata%E2%80%9D.v2.jsonl"
        )
        assert answer.headers["x-content-type-options"] == "nosniff"

    def test_interrupted_content_download_is_resumed(self, emptied: ApiServer) -> None:
        id = _made(emptied)
        path = f"/v1/datasets/{id}/content"
        tag = emptied.client.get(path).headers["etag"]
        part = emptied.client.get(path, headers={"Range": "bytes=100000-", "If-Range": tag})
        assert (part.status_code, part.content) == (206, CONTENT[100_000:])
        other = emptied.client.get(path, headers={"Range": "bytes=100000-", "If-Range": '"another"'})
        assert (other.status_code, other.content) == (200, CONTENT)
        behind = emptied.client.get(path, headers={"Range": f"bytes={len(CONTENT)}-"})
        assert (behind.status_code, behind.headers["content-type"]) == (416, "application/problem+json")

    def test_content_of_missing_dataset_or_file_is_404(self, api: ApiServer, engine: Engine) -> None:
        for id, code in ((new_id("ds"), "dataset_not_found"), (make_dataset(engine), "content_missing")):
            answer = api.client.get(f"/v1/datasets/{id}/content")
            assert (answer.status_code, answer.json()["code"]) == (404, code)


class TestDelete:
    def test_removes_row_and_file(self, emptied: ApiServer) -> None:
        id = _made(emptied)
        answer = emptied.client.delete(f"/v1/datasets/{id}")
        assert (answer.status_code, answer.content) == (204, b"")
        assert emptied.client.get(f"/v1/datasets/{id}").status_code == 404
        assert emptied.client.get(f"/v1/datasets/{id}/content").status_code == 404
        assert emptied.client.delete(f"/v1/datasets/{id}").json()["code"] == "dataset_not_found"
        eventually(lambda: not _files(emptied.settings), what="the file is gone")

    @pytest.mark.parametrize("column", ["dataset_id", "eval_dataset_id", "extra_eval_datasets"])
    def test_delete_is_refused_while_a_live_or_ended_run_refers_to_the_dataset(
        self, emptied: ApiServer, column: str
    ) -> None:
        id, other = _made(emptied), _made(emptied)
        config, named = {"eval_steps": 10} if column == "eval_dataset_id" else {}, {column: id}
        if column == "extra_eval_datasets":
            config, named = {"eval_steps": 10, "eval_split": 0.5}, {column: {"code": id}}
        run = make_run(emptied.client, **{"dataset_id": other, **named}, config=config)["id"]
        for status in ("pending", "cancelled"):
            answer = emptied.client.delete(f"/v1/datasets/{id}")
            assert (answer.status_code, answer.json()["code"]) == (409, "dataset_in_use")
            assert f"{run} ({status})" in answer.json()["detail"]
            emptied.client.post(f"/v1/runs/{run}/stop")
        assert Storage(emptied.settings).dataset_file(id, "jsonl").is_file()

    def test_delete_and_concurrent_creation_of_a_run_never_both_succeed(self, emptied: ApiServer) -> None:
        with ThreadPoolExecutor(2) as pool:
            for _ in range(8):
                id = _made(emptied, lines({"text": "a"}))
                body = {"backend": "fake", "dataset_id": id, "config": {"base_model": "any"}}
                creation = pool.submit(emptied.client.post, "/v1/runs", json=body)
                deleted = pool.submit(emptied.client.delete, f"/v1/datasets/{id}")
                assert (creation.result().status_code, deleted.result().status_code) in ((202, 409), (422, 204))

    def test_delete_needs_write_scope(self, emptied: ApiServer) -> None:
        id = _made(emptied)
        with emptied.client_with(emptied.key_with(["read"])) as reader:
            assert reader.delete(f"/v1/datasets/{id}").status_code == 403
            assert reader.get(f"/v1/datasets/{id}/content").status_code == 200


def test_the_list_is_filtered_by_a_part_of_the_name_and_by_format(emptied: ApiServer) -> None:
    texts = [_made(emptied, lines({"text": "a"}), name) for name in ("Alpha.jsonl", "beta_100%.jsonl", "ALPHA 2.jsonl")]
    pair = _made(emptied, lines({"prompt": "a", "completion": "b"}), "alpha.jsonl")

    def listed(**params: str) -> list[str]:
        answer = emptied.client.get("/v1/datasets", params=params)
        assert answer.status_code == 200, answer.text
        return [item["id"] for item in answer.json()["data"]]

    assert listed(search="alpha") == [pair, texts[2], texts[0]]
    assert listed(search="alpha", format="text", limit="1") == [texts[2]]
    assert listed(format="prompt_completion") == [pair]
    assert listed(search="0%") == [texts[1]]
    assert listed(search="_1") == [texts[1]]
    assert listed(format="preference") == []
    assert emptied.client.get("/v1/datasets", params={"format": "odd"}).status_code == 422


class TestIdempotencyKey:
    def test_repeated_idempotency_key_returns_the_same_dataset_with_one_file(self, emptied: ApiServer) -> None:
        first = upload(emptied, CONTENT, key="k1", name="a")
        again = upload(emptied, CONTENT, key="k1", name="a")
        assert (first.status_code, again.status_code) == (201, 201)
        assert first.json() == again.json() and first.headers["location"] == again.headers["location"]
        assert len(_files(emptied.settings)) == 1
        assert _made(emptied, key="k2", name="a") != first.json()["id"]

    def test_idempotency_key_with_other_content_or_fields_is_refused(self, emptied: ApiServer) -> None:
        first = _made(emptied, key="k")
        for content, fields in ((CONTENT + CONTENT, {}), (CONTENT, {"format": "text"}), (CONTENT, {"name": "n"})):
            parts: dict[str, Any] = {"file": ("data.jsonl", content)}
            answer = emptied.client.post("/v1/datasets", files=parts, data=fields, headers={"Idempotency-Key": "k"})
            assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")
            assert first in answer.json()["detail"]
        assert len(_files(emptied.settings)) == 1

    def test_idempotency_key_of_a_refused_upload_can_be_used_again(self, emptied: ApiServer) -> None:
        assert upload(emptied, b"bad\n", key="k").status_code == 422
        assert upload(emptied, CONTENT, key="k").status_code == 201

    def test_belongs_to_its_caller(self, emptied: ApiServer) -> None:
        first = _made(emptied, key="k")
        with emptied.client_with(emptied.key_with(["write"])) as other:
            answer = other.post("/v1/datasets", files={"file": ("d", CONTENT)}, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 201 and answer.json()["id"] != first

    def test_idempotency_key_is_deleted_with_its_dataset(self, emptied: ApiServer) -> None:
        first = _made(emptied, key="k")
        assert emptied.client.delete(f"/v1/datasets/{first}").status_code == 204
        assert _made(emptied, key="k") != first

    def test_concurrent_uploads_with_one_idempotency_key_create_one_dataset(self, emptied: ApiServer) -> None:
        with ThreadPoolExecutor(4) as pool:
            for round in range(4):
                answers = list(pool.map(lambda key: upload(emptied, CONTENT, key=key), [f"round {round}"] * 4))
                assert {answer.status_code for answer in answers} == {201}
                assert len({answer.json()["id"] for answer in answers}) == 1
        assert len(emptied.client.get("/v1/datasets").json()["data"]) == len(_files(emptied.settings)) == 4

    @pytest.mark.parametrize(("twins", "status"), [(1, 201), (2, 409)])
    def test_outlives_twins_whose_datasets_are_deleted_at_once(
        self, api: ThreadServer, settings: Settings, twins: int, status: int
    ) -> None:
        caller = api.client.get(f"/v1/datasets/{_made(api)}").json()["created_by"]
        engine = sync_engine(settings.database_url or "")
        dataset_ids: list[str] = []

        def come(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("INSERT INTO dataset_idempotency_keys") and len(dataset_ids) < twins:
                dataset_ids.append(make_dataset(engine))
                row = {
                    "created_by": caller,
                    "idempotency_key": "k",
                    "request_digest": "d",
                    "dataset_id": dataset_ids[-1],
                }
                with engine.begin() as connection:
                    connection.execute(insert(DatasetIdempotencyKey).values(row))

        def go(_connection: Any) -> None:
            with engine.begin() as connection:
                connection.execute(delete(Dataset).where(Dataset.id.in_(dataset_ids)))

        listened = api.application.state.engine.sync_engine
        event.listen(listened, "before_cursor_execute", come)
        event.listen(listened, "rollback", go)
        answer = upload(api, CONTENT, key="k")
        assert (answer.status_code, len(dataset_ids)) == (status, twins), answer.text
        assert len(_files(settings)) == (2 if status == 201 else 1)
        engine.dispose()

    @pytest.mark.parametrize("key", ["", "x" * 256, "ü"])
    def test_must_be_one(self, emptied: ApiServer, key: str) -> None:
        headers = {"Idempotency-Key": key.encode("latin-1")}
        answer = emptied.client.post("/v1/datasets", files={"file": ("d", CONTENT)}, headers=headers)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "Idempotency-Key")
