"""Promises about datasets: what is kept, what is refused, and that nothing of a refused file stays."""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from app.config import Settings
from app.datasets import service
from app.infra.db import async_engine, session_maker
from app.infra.ids import new_id
from app.infra.storage import Storage
from tests.app.uploads import framed, streamed
from tests.server import ApiServer, ThreadServer
from tests.waiting import eventually

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
PAIR = {"prompt": "p", "completion": "c"}
TEXT = {"text": "t"}


def _lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _upload(api: ApiServer, content: Any, name: str = "data.jsonl", **fields: str) -> httpx.Response:
    return api.client.post("/v1/datasets", files={"file": (name, content)}, data=fields)


def _stored(settings: Settings) -> list[Path]:
    return [path for path in settings.storage_root.rglob("*") if path.is_file()]


def _refused(api: ApiServer, answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    codes = [body["code"], *[item["code"] for item in body.get("errors", [])]]
    assert code in codes, body
    assert len(answer.content) < 10_000
    assert _stored(api.settings) == []
    assert list(api.settings.storage_root.glob("staging/*")) == []
    assert api.client.get("/v1/datasets").json()["data"] == []
    return body


@pytest.mark.parametrize(("format", "row"), [("chat", CHAT), ("prompt_completion", PAIR), ("text", TEXT)])
def test_each_format_is_recognised_and_kept_byte_for_byte(
    api: ApiServer, settings: Settings, format: str, row: dict[str, Any]
) -> None:
    content = _lines(row, {**row, "source": "web"}, row, row)
    answer = _upload(api, content, "my data.jsonl")
    assert answer.status_code == 201, answer.text
    body = answer.json()
    assert re.fullmatch(r"ds_[0-9a-z]{26}", body["id"])
    assert answer.headers["location"] == f"/v1/datasets/{body['id']}"
    assert (body["name"], body["format"], body["rows"]) == ("my data.jsonl", format, 4)
    assert (body["bytes"], body["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert body["columns"] == [*row, "source"]
    assert body["preview"] == [row, {**row, "source": "web"}, row]
    assert Storage(settings).dataset_file(body["id"], "jsonl").read_bytes() == content
    assert api.client.get(answer.headers["location"]).json() == body
    listed = api.client.get("/v1/datasets").json()["data"]
    assert [item["id"] for item in listed] == [body["id"]]
    assert "preview" not in listed[0]


def test_name_and_format_are_taken_in_any_order(api: ApiServer) -> None:
    content = _lines({**TEXT, "prompt": "p", "completion": "c"})
    first = api.client.post(
        "/v1/datasets", files=[("format", (None, "text")), ("name", (None, "N")), ("file", ("x", content))]
    )
    assert (first.json()["format"], first.json()["name"]) == ("text", "N")
    last = api.client.post("/v1/datasets", files=[("file", ("x", _lines(TEXT))), ("format", (None, "text"))])
    assert last.status_code == 201
    ambiguous = api.client.post("/v1/datasets", files=[("file", ("x", content))])
    assert ambiguous.json()["errors"][0]["code"] == "ambiguous_format"


@pytest.mark.parametrize("name", ["../../etc/passwd", "..\\..\\x", "/etc/passwd", "a\x1b[31m", ""])
def test_a_file_name_is_a_label_and_never_a_path(api: ApiServer, settings: Settings, name: str) -> None:
    disposition = f'form-data; name="file"; filename="{name}"'.encode()
    body = b"--b\r\nContent-Disposition: " + disposition + b"\r\n\r\n" + _lines(TEXT) + b"\r\n--b--\r\n"
    answer = _multipart(api, body)
    assert answer.status_code == 201, answer.text
    assert "/" not in answer.json()["name"] and "\x1b" not in answer.json()["name"] and answer.json()["name"]
    assert [path.name for path in _stored(settings)] == ["data.jsonl"]


def test_windows_line_ends_and_a_missing_or_doubled_last_one_are_fine(api: ApiServer) -> None:
    row = json.dumps(TEXT).encode()
    for content, rows in ((row, 1), (row + b"\r\n" + row + b"\r\n", 2), (row + b"\n" + row + b"\n\n \n", 2)):
        answer = _upload(api, content)
        assert (answer.status_code, answer.json()["rows"]) == (201, rows)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"not json", "invalid_json"),
        (b"[1]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"{}", "missing_column"),
        (b'{"text": ""}', "empty_text"),
        (b'{"text": " \\n"}', "empty_text"),
        (b'{"text": 1}', "wrong_type"),
        (b'{"text": null}', "wrong_type"),
        (b'{"text": "a", "text": "b"}', "duplicate_key"),
        (b'{"text": "a\\u0000"}', "nul_in_text"),
        (b'{"text": "a\x00"}', "invalid_json"),
        (b'{"text": "\\ud800"}', "lone_surrogate"),
        (b'{"text": "\xc3"}', "not_utf8"),
        (b'{"text": NaN}', "wrong_type"),
        (b'{"text": "a", "x": 1e999}', "not_finite"),
        (b'{"text": "a", "x": ' + b"[" * 40 + b"]" * 40 + b"}", "too_deep"),
        (b'{"text": "a", "x": ' + b"[" * 100_000 + b"}", "too_deep"),
        (b'{"text": "a", "x": [' + b"[]," * 500_000 + b"0]}", "too_many_values"),
        (b'{"text": "a", "x": [' + b'"\\\\\\",",' * 500_000 + b"0]}", "too_many_values"),
        (b'{"text": "a", "' + b"k" * 300 + b'": 1}', "key_too_long"),
        (b'{"prompt": "a", "completion": "b"}', "missing_column"),
        (b"", "empty_line"),
    ],
    ids=lambda value: None if isinstance(value, str) else "line",
)
def test_a_bad_row_is_named_by_its_line(shared_api: ApiServer, line: bytes, code: str) -> None:
    content = _lines(TEXT, TEXT) + line + b"\n" + _lines(TEXT)
    body = _refused(shared_api, _upload(shared_api, content), 422, "bad_rows")
    assert [(item["field"], item["code"]) for item in body["errors"]] == [("line 3", code)]
    assert "line 3" in body["detail"] and "Nothing was stored" in body["detail"]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"messages": []}, "wrong_type"),
        ({"messages": "hello"}, "wrong_type"),
        ({"messages": ["hello"]}, "wrong_type"),
        ({"messages": [{"role": "user", "content": "q"}]}, "no_assistant_message"),
        ({"messages": [{"role": "bot", "content": "q"}]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "unknown_role"),
        ({"messages": [{"content": "q"}]}, "unknown_role"),
        ({"messages": [{"role": "assistant"}]}, "wrong_type"),
        ({"messages": [{"role": "assistant", "content": None}]}, "wrong_type"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "empty_text"),
        ({"messages": [{"role": "assistant", "content": "a", "nmae": "x"}]}, "unknown_key"),
        ({"prompt": "p"}, "missing_column"),
    ],
)
def test_a_chat_row_must_be_whole(shared_api: ApiServer, row: dict[str, Any], code: str) -> None:
    body = _refused(shared_api, _upload(shared_api, _lines(CHAT, row)), 422, "bad_rows")
    assert [(item["field"], item["code"]) for item in body["errors"]] == [("line 2", code)]


@pytest.mark.parametrize("row", [{"prompt": "p"}, {"completion": "c"}, {"prompt": "", "completion": "c"}, CHAT])
def test_a_prompt_needs_its_completion(shared_api: ApiServer, row: dict[str, Any]) -> None:
    body = _refused(shared_api, _upload(shared_api, _lines(PAIR, row)), 422, "bad_rows")
    assert [item["field"] for item in body["errors"]] == ["line 2"]


def test_the_first_twenty_bad_rows_are_listed(shared_api: ApiServer) -> None:
    content = b"".join(_lines(TEXT) + b"bad\n" for _ in range(50))
    body = _refused(shared_api, _upload(shared_api, content), 422, "bad_rows")
    assert [item["field"] for item in body["errors"]] == [f"line {number}" for number in range(2, 42, 2)]
    assert "at least 20 rows are not valid" in body["detail"]
    few = _refused(shared_api, _upload(shared_api, b"bad\n" * 2 + _lines(TEXT)), 422, "bad_rows")
    assert ": 2 rows are not valid" in few["detail"]


@pytest.mark.parametrize("content", [b"", b"\n", b"\n \n\r\n"])
def test_an_empty_file_is_refused(shared_api: ApiServer, content: bytes) -> None:
    _refused(shared_api, _upload(shared_api, content), 422, "empty_file")


def test_upload_in_another_encoding_is_refused_with_its_name(shared_api: ApiServer) -> None:
    _refused(shared_api, _upload(shared_api, '{"text": "a"}\n'.encode("utf-16")), 422, "byte_order_mark")


def test_upload_of_another_file_type_is_refused_with_the_accepted_ones(shared_api: ApiServer) -> None:
    for content in (b"text\nhello\n", b'[{"text": "a"}]', b"PAR1\x00\x01\x02", b'{\n  "text": "a"\n}\n'):
        _refused(shared_api, _upload(shared_api, content), 422, "bad_rows")
    _refused(shared_api, _upload(shared_api, b"text\nhello\n", "notes.txt"), 422, "unknown_file_format")


def test_requests_are_answered_during_an_upload(api: ApiServer) -> None:
    slowest = 0.0

    def rows() -> Iterator[bytes]:
        nonlocal slowest
        with api.client_with(api.key) as other:
            for number in range(60):
                yield _lines({"text": "z" * 100}) * 4000
                if number % 10 == 9:
                    started = time.monotonic()
                    assert other.get("/v1/experiments").status_code == 200
                    slowest = max(slowest, time.monotonic() - started)

    assert streamed(api, framed(rows())).status_code == 201
    assert slowest < 2


def test_upload_above_the_limit_is_413_with_and_without_content_length(settings: Settings) -> None:
    small = settings.model_copy(update={"max_upload_bytes": 100_000})
    with ThreadServer(small) as api:
        content = _lines({"text": "x" * 999}) * 200
        _refused(api, _upload(api, content), 413, "body_too_large")
        _refused(api, streamed(api, framed(iter([content]))), 413, "body_too_large")
        just = _lines({"text": "x" * (100_000 - 13)})
        assert len(just) == 100_000
        assert _upload(api, just).status_code == 201


def test_a_full_disk_is_507_and_leaves_nothing(api: ApiServer, settings: Settings) -> None:
    """A file-size limit of the kernel stands for the disk: the same short write, then the same kind of error."""
    from app.datasets import importer as module

    class FullDisk:
        def __init__(self, file: Any) -> None:
            self._file = file
            self._left = 1_500_000

        def write(self, view: memoryview) -> int:
            if not self._left:
                raise OSError(28, "No space left on device")
            took = view[: self._left]
            self._left -= len(took)
            written: int = self._file.write(took)
            return written

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    opened = Path.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Path, "open", lambda path, *rest, **more: FullDisk(opened(path, *rest, **more)))
        answer = _upload(api, _lines({"text": "x" * 999}) * 5000)
    _refused(api, answer, 507, "disk_full")
    assert _upload(api, _lines(TEXT)).status_code == 201


def test_a_client_that_leaves_half_way_leaves_nothing(api: ApiServer, settings: Settings) -> None:
    def broken() -> Iterator[bytes]:
        yield _lines(TEXT) * 100_000
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        streamed(api, framed(broken()))
    staging = settings.storage_root / "staging"
    eventually(lambda: staging.exists() and not list(staging.iterdir()), timeout=10, what="staging is empty")
    assert api.client.get("/v1/datasets").json()["data"] == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "broken_multipart"),
        (b"nonsense", "broken_multipart"),
        (b"--b--\r\n", "missing"),
        (b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n{"text": "a"}\n', "broken_multipart"),
        (b'--b\r\nContent-Disposition: form-data; name="other"\r\n\r\nx\r\n--b--\r\n', "unknown_field"),
        (b"--b\r\n\r\nx\r\n--b--\r\n", "unknown_field"),
        (b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\n' + b"x" * 2000 + b"\r\n--b--\r\n", "too_long"),
        (b'--b\r\nContent-Disposition: form-data; name="format"\r\n\r\nodd\r\n--b--\r\n', "unknown_format"),
        (b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\n\xff\r\n--b--\r\n', "missing"),
        (b"--b\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n", "broken_multipart"),
        (b"--b\r\n" + b"x:y\r\n" * 8 + b"\r\nx\r\n--b--\r\n", "unknown_field"),
        (b"--b\r\n" + b"x:y\r\n" * 9 + b"\r\nx\r\n--b--\r\n", "broken_multipart"),
    ],
)  # fmt: skip
def test_a_malformed_upload_is_422(shared_api: ApiServer, body: bytes, code: str) -> None:
    _refused(shared_api, _multipart(shared_api, body), 422, code)


def test_the_same_part_twice_and_another_format_are_422(shared_api: ApiServer) -> None:
    twice = shared_api.client.post("/v1/datasets", files=[("file", ("a", _lines(TEXT))), ("file", ("b", _lines(TEXT)))])
    _refused(shared_api, twice, 422, "given_twice")
    late = shared_api.client.post("/v1/datasets", files=[("file", ("a", _lines(TEXT))), ("format", (None, "chat"))])
    _refused(shared_api, late, 422, "format_mismatch")
    early = shared_api.client.post("/v1/datasets", files=[("format", (None, "chat")), ("file", ("a", _lines(TEXT)))])
    _refused(shared_api, early, 422, "bad_rows")


def test_upload_with_a_long_content_type_is_422(shared_api: ApiServer) -> None:
    kind = "multipart/form-data; boundary=b" + ";a=b" * 300
    answer = shared_api.client.post("/v1/datasets", content=b"--b--\r\n", headers={"Content-Type": kind})
    _refused(shared_api, answer, 422, "broken_multipart")
    assert "Content-Type" in answer.json()["errors"][0]["message"]


@pytest.mark.parametrize("kind", ["application/octet-stream", "multipart/form-data", "text/plain", ""])
def test_upload_with_unsupported_media_type_is_415(shared_api: ApiServer, kind: str) -> None:
    answer = shared_api.client.post("/v1/datasets", content=_lines(TEXT), headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")


def test_the_preview_is_short_however_large_the_rows(api: ApiServer) -> None:
    row = {"text": "x" * 100_000, "list": list(range(10_000)), "map": {str(n): "y" * 1000 for n in range(1000)},
           "deep": [[["z" * 1000] * 10] * 10] * 10, "number": 10**4000}  # fmt: skip
    answer = _upload(api, _lines(row, row, row, row))
    assert answer.status_code == 201, answer.text
    assert len(answer.content) < 100_000
    assert len(answer.json()["preview"]) == 3
    assert answer.json()["preview"][0]["text"] == "x" * 299 + "…"


def test_a_commit_that_fails_takes_its_file_with_it(api: ApiServer, settings: Settings) -> None:
    assert settings.database_url
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE datasets ADD CONSTRAINT none_today CHECK (rows < 0)")
    assert _upload(api, _lines(TEXT)).status_code == 500
    assert _stored(settings) == []


async def test_what_a_killed_upload_left_is_swept_and_datasets_are_not(settings: Settings) -> None:
    storage = Storage(settings)
    orphan = storage.dataset_file(new_id("ds"), "jsonl")
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"x")
    staged = settings.storage_root / "staging" / "abc" / "data"
    staged.parent.mkdir(parents=True)
    staged.write_bytes(b"x")
    with ThreadServer(settings) as api:
        dataset_id = _upload(api, _lines(TEXT)).json()["id"]
    engine = async_engine(settings.database_url or "")
    try:
        assert await service.sweep_orphans(session_maker(engine), storage, older_than_seconds=3600) == 0
        assert orphan.exists() and staged.exists()
        assert await service.sweep_orphans(session_maker(engine), storage, older_than_seconds=-1) == 2
        # The database may be the older one of the two, so its word alone deletes nothing.
        (aside,) = (settings.storage_root / "aside").iterdir()
        assert (aside / orphan.name).read_bytes() == b"x" and not orphan.exists() and not staged.exists()
        os.utime(aside, (0, time.time() - service.ASIDE_SECONDS - 60))
        assert await service.sweep_orphans(session_maker(engine), storage, older_than_seconds=-1) == 0
        assert not aside.exists()
    finally:
        await engine.dispose()
    assert _stored(settings) == [storage.dataset_file(dataset_id, "jsonl")]


def _multipart(api: ApiServer, body: bytes) -> httpx.Response:
    return api.client.post("/v1/datasets", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})
