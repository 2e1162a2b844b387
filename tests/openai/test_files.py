"""Files as OpenAI's client uploads, lists and downloads them: datasets under another view, byte for byte."""

import gzip
import io
import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import openai
import psycopg
import pytest
from sqlalchemy import Engine, select, text

from app.config import Settings
from app.infra.ids import new_id
from app.openai import files, retries
from app.openai.ids import to_native_id, to_openai_id
from app.tables.datasets import Dataset
from tests.app.uploads import lines
from tests.factories import make_run
from tests.openai.conftest import async_client_of, client_of
from tests.openai.proxy import Fault, losing_answers, waiting_insertions
from tests.openai.test_errors import error_of
from tests.server import ApiServer, ThreadServer
from tests.waiting import eventually

CHAT = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2", "weight": 1}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = {
    "messages": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "2"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    "parallel_tool_calls": False,
}
PAIR = {
    "input": {"messages": [{"role": "user", "content": "Hi"}], "tools": [], "parallel_tool_calls": True},
    "preferred_output": [{"role": "assistant", "content": "Hello!"}],
    "non_preferred_output": [{"role": "assistant", "content": "What?"}],
}
LEGACY = {
    "messages": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "function", "name": "add", "content": "2"},
        {"role": "assistant", "content": "2"},
    ],
    "functions": [{"name": "add", "parameters": {"type": "object"}}],
}


def stored_files(api: ApiServer) -> list[str]:
    return sorted(path.name for path in api.settings.storage_root.glob("datasets/*/*"))


def upload(client: openai.OpenAI, content: bytes, name: str = "train.jsonl") -> Any:
    return client.files.create(file=(name, io.BytesIO(content)), purpose="fine-tune")


def dataset_of(api: ApiServer, file_id: str) -> dict[str, Any]:
    shown = api.client.get(f"/v1/datasets/{to_native_id(file_id, 'ds')}")
    assert shown.status_code == 200, shown.text
    dataset: dict[str, Any] = shown.json()
    return dataset


@pytest.mark.parametrize(
    ("content", "format", "is_converted"),
    [
        (lines(CHAT, TOOLS), "chat", False),
        (lines(CHAT).rstrip(b"\n"), "chat", True),
        (lines(CHAT) + b"\n\n", "chat", True),
        (lines(CHAT).replace(b"\n", b"\r\n"), "chat", False),
        (json.dumps(CHAT).replace("2", "\\u0032").encode() + b"\n", "chat", False),
        (lines(PAIR), "preference", True),
        (lines(LEGACY), "chat", True),
        (lines({"prompt": "1 + 1 =", "completion": " 2"}), "prompt_completion", False),
        (gzip.compress(lines(CHAT), mtime=0), "chat", True),
    ],
    ids=["chat", "no-last-newline", "empty-lines", "crlf", "escapes", "pairs", "functions", "completions", "gzip"],
)
def test_file_is_returned_byte_for_byte_and_its_rows_are_a_dataset(
    emptied_api: ApiServer, client: openai.OpenAI, content: bytes, format: str, is_converted: bool
) -> None:
    created = upload(client, content)
    assert (created.object, created.purpose, created.status) == ("file", "fine-tune", "processed")
    assert (created.filename, created.bytes) == ("train.jsonl", len(content))
    assert client.files.retrieve(created.id) == created
    assert client.files.content(created.id).read() == content
    dataset = dataset_of(emptied_api, created.id)
    assert (dataset["format"], dataset["name"]) == (format, "train.jsonl")
    rows = emptied_api.client.get(f"/v1/datasets/{dataset['id']}/content").content
    assert (rows != content) == is_converted
    assert ("original_bytes" in dataset["source"]) == is_converted


def test_original_is_kept_only_where_it_differs_and_deleted_with_the_file(
    emptied_api: ApiServer, client: openai.OpenAI
) -> None:
    before = stored_files(emptied_api).count("data.original")
    same, converted = upload(client, lines(CHAT)), upload(client, lines(PAIR))
    assert stored_files(emptied_api).count("data.original") == before + 1
    for file in (same, converted):
        deleted = client.files.delete(file.id)
        assert (deleted.id, deleted.deleted, deleted.object) == (file.id, True, "file")
        with pytest.raises(openai.NotFoundError) as unknown:
            client.files.retrieve(file.id)
        assert unknown.value.code == "file_not_found"
    eventually(lambda: stored_files(emptied_api).count("data.original") == before)


def test_datasets_of_the_native_api_are_files_too(emptied_api: ApiServer, client: openai.OpenAI) -> None:
    csv = b"prompt,completion\na,b\n"
    dataset = emptied_api.client.post("/v1/datasets", files={"file": ("rows.csv", csv)}).json()
    (file,) = client.files.list()
    assert (file.id, file.filename, file.bytes) == (to_openai_id(dataset["id"]), "rows.csv", dataset["bytes"])
    assert client.files.content(file.id).read() == b'{"prompt": "a", "completion": "b"}\n'


def test_files_are_listed_page_by_page_in_both_orders(client: openai.OpenAI) -> None:
    ids = [upload(client, lines(CHAT), f"{number}.jsonl").id for number in range(5)]
    assert [file.id for file in client.files.list()] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1], "the client asks for the next pages itself"
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
    page = client.files.list(limit=2, after=ids[3])
    assert [file.id for file in page.data] == [ids[2], ids[1]] and page.has_more
    assert len(list(client.files.list(purpose="fine-tune"))) == 5 and not list(client.files.list(purpose="batch"))


def test_page_of_files_which_may_be_long_keeps_no_other_request_waiting(
    emptied_api: ApiServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(client, lines(CHAT))
    threads, create = set(), files._file_object

    def create_noting_thread(dataset: Any) -> Any:
        threads.add(threading.current_thread().name)
        return create(dataset)

    monkeypatch.setattr(files, "_file_object", create_noting_thread)
    assert len(client.files.list().data) == 1
    assert threads and "api" not in threads  # that of the event loop


@pytest.mark.parametrize(
    ("call", "param", "message"),
    [
        ({"purpose": "assistants"}, "purpose", "must be `fine-tune`"),
        ({"extra_body": {"expires_after": {"anchor": "created_at"}}}, "expires_after[anchor]", "`purpose`"),
        ({"extra_body": {"name": "x"}}, "name", "the supported parts are `file`, `purpose`"),
    ],
)
def test_part_that_is_not_supported_is_refused_by_name(
    emptied_api: ApiServer, client: openai.OpenAI, call: dict[str, Any], param: str, message: str
) -> None:
    before = stored_files(emptied_api)
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.files.create(**{"file": ("x.jsonl", lines(CHAT)), "purpose": "fine-tune", **call})
    assert refused.value.param == param
    assert stored_files(emptied_api) == before


def test_purpose_is_required_before_or_after_the_file(emptied_api: ApiServer) -> None:
    file = ("file", ("x.jsonl", lines(CHAT)))
    for parts, status in (([file], 400), ([file, ("purpose", (None, "fine-tune"))], 200)):
        answer = emptied_api.client.post("/openai/v1/files", files=parts)
        assert answer.status_code == status, answer.text
    refused = emptied_api.client.post("/openai/v1/files", files=[file, ("purpose", (None, "batch"))])
    assert (refused.status_code, error_of(refused)["param"]) == (400, "purpose")


def test_rows_that_are_not_valid_are_named_and_nothing_is_kept(emptied_api: ApiServer, client: openai.OpenAI) -> None:
    before = stored_files(emptied_api)
    bad = {"messages": [{"role": "user", "content": "no answer"}]}
    with pytest.raises(openai.BadRequestError, match="line 2") as refused:
        upload(client, lines(CHAT, bad))
    assert (refused.value.code, refused.value.param) == ("bad_rows", "line 2")
    for content in (b"", b"\n", b"\xff\xfe{", b"%PDF-1.7", lines({"text": "a"}, CHAT)):
        with pytest.raises(openai.BadRequestError):
            upload(client, content)
    assert stored_files(emptied_api) == before and not list(client.files.list())


def test_body_of_another_kind_is_refused(emptied_api: ApiServer) -> None:
    for kind in ("application/json", "", "multipart/form-data"):
        answer = emptied_api.client.post("/openai/v1/files", content=b"{}", headers={"Content-Type": kind})
        assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")


def test_upload_above_the_limit_is_refused(shared_api: ApiServer) -> None:
    small = shared_api.settings.model_copy(update={"max_upload_bytes": 1000})
    with ThreadServer(small) as api, client_of(api) as client, pytest.raises(openai.APIStatusError) as refused:
        upload(client, lines(*[CHAT] * 20))
    assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")


@pytest.mark.parametrize("file_id", ["x", "ds_" + "0" * 26, "file-" + "0" * 26, "ftjob-" + "0" * 26, "%2e%2e"])
def test_unknown_file_is_named(emptied_api: ApiServer, file_id: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
        answer = emptied_api.client.request(method, f"/openai/v1/files/{file_id}{path}")
        error = error_of(answer)
        assert answer.status_code == 404 and error["code"] in ("file_not_found", "not_found")
    answer = emptied_api.client.get("/openai/v1/files", params={"after": "x"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "after")


def test_file_of_a_run_is_not_deleted(emptied_api: ApiServer, client: openai.OpenAI) -> None:
    file = upload(client, lines(CHAT))
    run = make_run(emptied_api.client, str(to_native_id(file.id, "ds")))
    with pytest.raises(openai.ConflictError, match=run["id"]) as refused:
        client.files.delete(file.id)
    assert refused.value.code == "dataset_in_use"
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert client.files.retrieve(file.id) == file


def test_part_of_a_file_is_downloaded(emptied_api: ApiServer, client: openai.OpenAI) -> None:
    content = lines(PAIR, PAIR)
    file = upload(client, content)
    answer = emptied_api.client.get(f"/openai/v1/files/{file.id}/content", headers={"Range": "bytes=3-9"})
    assert (answer.status_code, answer.content) == (206, content[3:10])


def test_original_that_was_lost_or_changed_is_never_replaced_by_other_bytes(settings: Settings, tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    stored = Settings(**{**settings.model_dump(), "storage": f"file://{share}"})
    with ThreadServer(stored) as api, client_of(api) as client:
        file = upload(client, lines(PAIR))
        assert client.files.content(file.id).read() == lines(PAIR)
        beyond = api.client.get(f"/openai/v1/files/{file.id}/content", headers={"Range": "bytes=99999-"})
        assert (beyond.status_code, error_of(beyond)["code"]) == (416, "requested_range_not_satisfiable")
        (original,) = share.glob("datasets/*/data.original")
        original.write_bytes(lines(PAIR).replace(b"Hello", b"hello"))
        path = f"/openai/v1/files/{file.id}/content"
        changed = api.client.get(path)
        assert (changed.status_code, error_of(changed)["code"]) == (409, "content_corrupt")
        original.unlink()
        missing = api.client.get(path)
        assert (missing.status_code, error_of(missing)["code"]) == (404, "content_missing")


class TestRetry:
    @pytest.mark.parametrize(("fault", "times", "timeout"), [("cut", 2, 20), ("hold", 1, 0.7)])
    def test_upload_whose_answer_was_lost_is_stored_once(
        self, emptied_api: ApiServer, fault: Fault, times: int, timeout: float
    ) -> None:
        with (
            losing_answers(emptied_api, fault, times) as (proxy, url),
            client_of(emptied_api, url=url, timeout=timeout) as client,
        ):
            file = upload(client, lines(PAIR))
        assert proxy.answers_lost == times
        with client_of(emptied_api) as client:
            assert [listed.id for listed in client.files.list()] == [file.id]

    def test_retry_during_the_first_attempt_waits_for_its_file(self, emptied_api: ApiServer, engine: Engine) -> None:
        with psycopg.connect(emptied_api.settings.database_url or "") as lock:
            lock.execute("LOCK TABLE datasets IN SHARE ROW EXCLUSIVE MODE")
            with client_of(emptied_api, timeout=3, max_retries=4) as client:
                files: list[Any] = []
                thread = threading.Thread(target=lambda: files.append(upload(client, lines(CHAT))))
                thread.start()
                eventually(lambda: waiting_insertions(engine) >= 2)
                lock.rollback()
                thread.join()
        with client_of(emptied_api) as client:
            assert [listed.id for listed in client.files.list()] == [files[0].id]

    def test_retry_whose_body_takes_long_to_arrive_repeats_the_upload(
        self, emptied_api: ApiServer, client: openai.OpenAI, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retries, "_LOST_ANSWER", timedelta(seconds=2))
        first = upload(client, lines(CHAT))
        parts = [('name="purpose"', b"fine-tune"), ('name="file"; filename="train.jsonl"', lines(CHAT))]
        start, *more = [
            b"--x\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (name.encode(), value) for name, value in parts
        ]
        passed = text("SELECT 1 FROM openai_requests WHERE answered_at < clock_timestamp() - interval '2.1 s'")

        def send_slowly() -> Iterator[bytes]:
            yield start
            with engine.connect() as connection:
                eventually(lambda: connection.execute(passed).first(), what="the answer was long before")
            yield from (*more, b"--x--\r\n")

        headers = {"Content-Type": "multipart/form-data; boundary=x", "x-stainless-retry-count": "1"}
        again = emptied_api.client.post("/openai/v1/files", content=send_slowly(), headers=headers)
        assert (again.status_code, again.json()["id"]) == (200, first.id)
        assert [file.id for file in client.files.list()] == [first.id]

    def test_file_whose_deletion_was_answered_in_vain_is_deleted(self, emptied_api: ApiServer) -> None:
        with client_of(emptied_api) as client:
            file = upload(client, lines(CHAT))
            with losing_answers(emptied_api, "cut") as (_, url), client_of(emptied_api, url=url) as losing:
                assert losing.files.delete(file.id).deleted
            with pytest.raises(openai.NotFoundError):
                client.files.delete(file.id)

    def test_same_file_uploaded_twice_is_two_files(self, client: openai.OpenAI) -> None:
        ids = {upload(client, lines(CHAT)).id for _ in range(2)}
        assert len(ids) == 2 == len(list(client.files.list()))

    def test_idempotency_key_of_the_caller_counts_before_the_retry(self, emptied_api: ApiServer) -> None:
        headers = {"Idempotency-Key": "mine", "x-stainless-retry-count": "0"}
        with client_of(emptied_api, default_headers=headers) as client:
            assert upload(client, lines(CHAT)).id == upload(client, lines(CHAT)).id
            with pytest.raises(openai.BadRequestError) as reused:
                upload(client, lines(TOOLS))
        assert reused.value.code == "idempotency_key_reused"

    def test_retry_of_another_key_or_a_minute_after_the_answer_is_a_new_upload(
        self, emptied_api: ApiServer, client: openai.OpenAI, engine: Engine
    ) -> None:
        first = upload(client, lines(CHAT))

        def repeat(repeating: openai.OpenAI) -> str:
            file = ("train.jsonl", lines(CHAT))
            headers = {"x-stainless-retry-count": "1"}
            return repeating.files.create(file=file, purpose="fine-tune", extra_headers=headers).id

        assert repeat(client) == first.id
        with client_of(emptied_api, emptied_api.key_with(["write", "read"])) as other:
            assert repeat(other) != first.id
        unanswered = text("SELECT 1 FROM openai_requests WHERE answered_at IS NULL")
        ids = {first.id}
        for column, minutes in (("answered_at", 2), ("arrived_at", 61)):
            with engine.connect() as connection:
                eventually(lambda: connection.execute(unanswered).first() is None, what="the answer is recorded")
            past = f"{column} = now() - interval '{minutes} min'"
            with engine.begin() as connection:
                connection.execute(text(f"UPDATE openai_requests SET {past}"))
            ids.add(repeat(client))
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE openai_requests SET answered_at = NULL, arrived_at = now() - interval '9 min'")
            )
        assert repeat(client) in ids and len(ids) == 3, "a request without an answer is repeated"
        with engine.connect() as connection:
            assert len(connection.execute(select(Dataset.id)).all()) == 4


async def test_asynchronous_client_uploads_lists_and_deletes(emptied_api: ApiServer) -> None:
    async with async_client_of(emptied_api) as client:
        file = await client.files.create(file=("train.jsonl", lines(CHAT)), purpose="fine-tune")
        assert [listed.id async for listed in client.files.list()] == [file.id]
        assert (await client.files.content(file.id)).content == lines(CHAT)
        processed = await client.files.wait_for_processing(file.id, poll_interval=0.01)
        assert processed.status == "processed"
        assert (await client.files.delete(file.id)).deleted


def test_key_that_only_reads_downloads_and_stores_nothing(emptied_api: ApiServer, client: openai.OpenAI) -> None:
    file = upload(client, lines(CHAT))
    with client_of(emptied_api, emptied_api.key_with(["read"])) as reader:
        assert reader.files.content(file.id).read() == lines(CHAT)
        for refused in (lambda: upload(reader, lines(CHAT)), lambda: reader.files.delete(file.id)):
            with pytest.raises(openai.PermissionDeniedError, match="requires `write`"):
                refused()


def test_ids_map_one_to_one() -> None:
    for prefix, openai_prefix in (("ds", "file"), ("run", "ftjob"), ("ckpt", "ftckpt")):
        id = new_id(prefix)
        assert to_openai_id(id) == f"{openai_prefix}-{id.partition('_')[2]}"
        assert to_native_id(to_openai_id(id), prefix) == id
        assert to_native_id(id, prefix) is None and to_native_id(to_openai_id(id) + "0", prefix) is None
    assert to_native_id(to_openai_id(new_id("ds")), "run") is None
