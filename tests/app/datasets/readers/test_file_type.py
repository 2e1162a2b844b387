"""Promises about kinds of files: whatever comes, the rows are kept as JSONL, and a bad row is named by its place."""

import datetime
import decimal
import gzip
import io
import json
import time
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.api.errors import ApiError
from app.config import Settings
from app.datasets.importer import DatasetImporter, ImportOptions
from tests.app.uploads import CHAT, errors, lines, parquet, stored_rows, upload
from tests.server import ApiServer, ThreadServer

ROWS = [{"prompt": "häh?", "completion": 'so, "that"\nis it', "n": "1"}, {"prompt": "b", "completion": "c"}]
CSV = 'prompt,completion,n\r\nhäh?,"so, ""that""\nis it",1\r\nb,c,\r\n'.encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", lines(*ROWS)),
        ("a.json", json.dumps(ROWS).encode()),
        ("a.json", json.dumps({"data": ROWS}, indent=2).replace("\n", "\r\n").encode()),
        ("a.json", b" \n" + json.dumps(ROWS, indent=4).encode() + b"\n"),
        ("a.json", lines(*ROWS)),
        ("a.csv", CSV),
        ("A.CSV", BOM_UTF8 + CSV.replace(b"\r\n", b"\n") + b"\n\n"),
        ("a.jsonl", BOM_UTF8 + lines(*ROWS)),
        ("a.json", BOM_UTF8 + json.dumps({"data": ROWS}).encode()),
        ("nothing", BOM_UTF8 + json.dumps(ROWS).encode()),
        ("a.parquet", parquet(ROWS)),
        ("a.pq", parquet(ROWS, compression="zstd", row_group_size=1)),
        ("nothing", json.dumps(ROWS).encode()),
        ("nothing", lines(*ROWS)),
        ("nothing", parquet(ROWS)),
    ],
)
def test_every_kind_of_file_gives_the_same_rows(shared_api: ApiServer, name: str, content: bytes) -> None:
    assert stored_rows(shared_api, content, name) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "source"),
    [
        ("a.csv", b'prompt;completion;n\n"a;""b""";c,d;\n', ("csv", ";", False)),
        ("a.csv", b'prompt\tcompletion\n"a;""b"""\tc,d\n', ("csv", "\t", False)),
        ("a.tsv", b'prompt\tcompletion\na;"b"\tc,d\n', ("tsv", "\t", False)),
        ("a.csv", b'"prompt","completion"\n"a;""b""","c,d"\n', ("csv", ",", False)),
        ("a.tsv.gz", gzip.compress(b'prompt\tcompletion\na;"b"\tc,d\n', mtime=0), ("tsv", "\t", True)),
        (
            "a",
            gzip.compress(b'{"prompt": "a;\\"b\\"",', mtime=0) + gzip.compress(b' "completion": "c,d"}\n', mtime=0),
            ("jsonl", None, True),
        ),
        (
            "a.gz",
            gzip.compress(parquet([{"prompt": 'a;"b"', "completion": "c,d"}]), mtime=0) + b"\0\0",
            ("parquet", None, True),
        ),
    ],
)
def test_delimiters_and_compression_are_recognized(
    shared_api: ApiServer, name: str, content: bytes, source: tuple[str, str | None, bool]
) -> None:
    assert stored_rows(shared_api, content, name) == [{"prompt": 'a;"b"', "completion": "c,d"}]
    dataset = upload(shared_api, content, name).json()
    recognized = dict(zip(("file_format", "delimiter", "gzip"), source, strict=True)) | {"layout": None}
    assert dataset["source"].items() >= recognized.items()
    shown = shared_api.client.get(f"/v1/datasets/{dataset['id']}").json()
    assert shown["source"] == dataset["source"]


def test_the_name_of_a_wrong_delimiter_is_in_the_error(shared_api: ApiServer) -> None:
    (error,) = upload(shared_api, b"prompt;completion\na;b\na;b;c\n", "a.csv").json()["errors"]
    assert (error["field"], error["code"]) == ("line 3", "wrong_cell_count")
    assert "contain a semicolon" in error["message"]


def test_damaged_gzip_is_refused(shared_api: ApiServer) -> None:
    whole = gzip.compress(lines({"text": "a"}) * 100, mtime=0)
    for content in (whole[:-3], whole[:30], whole[:12] + b"\xff\xff" + whole[14:], whole + b"rest", whole + whole[:9]):
        assert errors(shared_api, content, "a.jsonl.gz") == [("file", "unreadable_gzip")]
    assert errors(shared_api, gzip.compress(b"", mtime=0), "a.jsonl.gz") == [("file", "empty_file")]
    assert errors(shared_api, gzip.compress(lines({"text": "a"}, {"text": 1}), mtime=0), "a.gz") == [
        ("line 2", "wrong_type")
    ]


def test_a_gzip_bomb_is_refused(settings: Settings, tmp_path: Path) -> None:
    """Rows that compress a thousandfold: refused by the ratio, and a smaller one by the limit of uploads."""
    bomb = gzip.compress(lines({"text": "x" * 1_000_000}) * 40, mtime=0)
    assert len(bomb) < 50_000
    for most, code, words in ((2**40, "invalid_request", "200 times its size"), (8_000_000, "body_too_large", "413")):
        reading = settings.model_copy(update={"max_upload_bytes": most})
        importer = DatasetImporter(tmp_path, reading, ImportOptions())
        importer.begin_file("x.jsonl.gz")
        with pytest.raises(ApiError) as refused:
            importer.feed(bomb)
        importer.close()
        assert refused.value.code == code
        assert words in str((refused.value.status, refused.value.detail, refused.value.errors))


def test_gzip_may_come_in_any_pieces(settings: Settings, tmp_path: Path) -> None:
    importer = DatasetImporter(tmp_path, settings, ImportOptions())
    importer.begin_file("x")
    for byte in gzip.compress(lines({"text": "a"}) * 5, mtime=0):
        importer.feed(bytes([byte]))
    importer.end_file()
    assert importer.finish_dataset("x").rows == 5
    importer.close()


def test_very_many_members_of_gzip_take_no_long_time(settings: Settings, tmp_path: Path) -> None:
    """Each has 20 bytes, and zlib copies all bytes that follow a member."""
    importer = DatasetImporter(tmp_path, settings, ImportOptions())
    importer.begin_file("x")
    began = time.thread_time()
    importer.feed(gzip.compress(b"", mtime=0) * 200_000)
    assert time.thread_time() - began < 10
    importer.feed(gzip.compress(lines({"text": "a"}), mtime=0))
    importer.end_file()
    assert importer.finish_dataset("x").rows == 1
    importer.close()


def test_stored_rows_do_not_depend_on_the_file_type(shared_api: ApiServer) -> None:
    files = {"a.jsonl": lines(*ROWS), "a.json": json.dumps(ROWS).encode(), "a.csv": CSV, "a.parquet": parquet(ROWS)}
    answers = [upload(shared_api, content, name).json() for name, content in files.items()]
    assert len({(it["sha256"], it["bytes"], it["rows"], it["format"]) for it in answers}) == 1


def test_the_kind_can_be_given_where_the_name_says_nothing_or_something_else(shared_api: ApiServer) -> None:
    assert stored_rows(shared_api, CSV, "a.txt", file_format="csv") == ROWS
    assert stored_rows(shared_api, json.dumps(ROWS).encode(), "a.jsonl", file_format="json") == ROWS
    assert errors(shared_api, CSV, "a.txt") == [("file", "unknown_file_format")]
    assert errors(shared_api, CSV, "a.csv", file_format="xlsx") == [("file_format", "unknown_file_format")]


def test_numbers_and_nesting_of_json_stay_as_they_are(shared_api: ApiServer) -> None:
    raw = b'[{"text": "a", "n": 123456789012345678901234567890, "f": 0.1, "deep": {"x": [1, {"y": "],}{["}]}}]'
    assert stored_rows(shared_api, raw, "a.json") == json.loads(raw)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ('{"text": "a", "text": "b"}', "duplicate_key"),
        ('{"text": NaN}', "wrong_type"),
        ('{"text": "a", "x": 1e999}', "not_finite"),
        ('{"text": "a\\u0000"}', "nul_in_text"),
        ('{"text": "\\ud800"}', "lone_surrogate"),
        ('{"text": "a", "x": ' + "[" * 40 + "]" * 40 + "}", "too_deep"),
        ('{"text": ]', "invalid_json"),
        ("", "invalid_json"),
        ('{"text": "a"} {"text": "b"}', "invalid_json"),
        ("7", "not_an_object"),
        ('{"text": ""}', "empty_text"),
        ('{"text": "' + "x" * 2000 + '"}', "row_too_long"),
    ],
)
def test_a_row_of_an_array_is_named_by_its_number(small_api: ApiServer, row: str, code: str) -> None:
    content = '[{"text": "a"}, {"text": "b"}, ' + row + ', {"text": "c"}]'
    assert errors(small_api, content.encode(), "a.json") == [("row 3", code)]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"[]", "empty_file"),
        (b'{"data": []}', "empty_file"),
        (b"", "empty_file"),
        (b'[{"text": "a"}', "unfinished_json"),
        (b'[{"text": "a"}, ', "unfinished_json"),
        (b'{"data": [{"text": "a"}]', "unfinished_json"),
        (b'[{"text": "a"}] x', "trailing_data"),
        (b'{"data": [{"text": "a"}], "more": 1}', "trailing_data"),
        (b'[{"text": "a"}}', "invalid_json"),
        (b'[{"text": "a"},]', "invalid_json"),
        (b"\xff\xfe[\x00", "byte_order_mark"),
    ],
)
def test_a_broken_array_is_refused_with_the_reason(shared_api: ApiServer, content: bytes, code: str) -> None:
    assert [found for _, found in errors(shared_api, content, "a.json")] == [code]


@pytest.mark.parametrize(
    ("record", "place", "code"),
    [
        (b"a\n", "line 4", "wrong_cell_count"),
        (b"a,b,c\n", "line 4", "wrong_cell_count"),
        (b'"a"b,c\n', "line 4", "invalid_csv"),
        (b"a\xff,b\n", "line 4", "not_utf8"),
        (b"a\x00,b\n", "line 4", "nul_in_text"),
        (b",b\n", "line 4", "empty_text"),
        (b"\n", "line 4", "empty_line"),
        (b'5" pipe,b\n', "line 4", "unfinished_csv"),
        (b'a,"' + b"x" * 2000 + b'"\n', "line 4", "row_too_long"),
        (b"\xef\xbb\xbfprompt, completion\n", "line 4", "repeated_header"),
    ],
)
def test_a_record_is_named_by_its_line(small_api: ApiServer, record: bytes, place: str, code: str) -> None:
    content = b'prompt,completion\n"a\nb",c\n' + record + b"a,b\n"
    assert errors(small_api, content, "a.csv") == [(place, code)]


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (b"text,text", "duplicate_column"),
        (b"text,", "missing_column_name"),
        (b"a,b", "unknown_format"),
        (b"a;b", "unknown_format"),
        (b"\t".join(b"c%d" % n for n in range(1001)), "too_many_columns"),
        (b'"text', "unfinished_csv"),
        (b"\xff\xfet\x00", "byte_order_mark"),
        (b",".join(b"c%d" % n for n in range(1001)), "too_many_columns"),
        (b"text," + b"k" * 300, "key_too_long"),
        (b"text,messages", "ambiguous_format"),
    ],
)  # fmt: skip
def test_a_bad_header_is_reported_once(shared_api: ApiServer, header: bytes, code: str) -> None:
    problems = errors(shared_api, header + b"\na,b\n" * 30, "a.csv")
    assert [it for _, it in problems] == [code]


def test_messages_in_a_cell_are_json(shared_api: ApiServer) -> None:
    cell = json.dumps(CHAT["messages"])
    quoted = '"' + cell.replace('"', '""') + '"'
    assert stored_rows(shared_api, f"messages\n{quoted}\n".encode(), "a.csv") == [CHAT]
    assert stored_rows(shared_api, parquet([{"messages": cell}]), "a.parquet") == [CHAT]
    problems = errors(shared_api, b"messages,n\nhello,1\n", "a.csv")
    assert problems == [("line 2", "invalid_json")]


def test_values_of_parquet_become_json_and_nulls_are_no_values(shared_api: ApiServer) -> None:
    messages = [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": "a", "name": None}]
    row: dict[str, Any] = {
        "messages": messages, "none": None, "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "price": decimal.Decimal("1.50"), "raw": b"\xff\x00", "list": [1, 2], "map": {"a": None, "b": 1.5},
    }  # fmt: skip
    assert stored_rows(shared_api, parquet([row]), "a.parquet") == [
        {**CHAT, "when": "2026-01-02T00:00:00+00:00", "price": "1.50", "raw": "/wA=", "list": [1, 2], "map": {"b": 1.5}}
    ]


def test_a_row_of_parquet_is_named_by_its_number(small_api: ApiServer) -> None:
    rows = [{"text": "a"}, {"text": None}, {"text": "b"}, {"text": " "}]
    assert errors(small_api, parquet(rows), "a.parquet") == [("row 2", "wrong_type"), ("row 4", "empty_text")]
    assert errors(small_api, parquet([{"text": "x" * 2000}]), "a.parquet") == [("row 1", "row_too_long")]
    assert errors(small_api, parquet([{"text": float("nan")}]), "a.parquet") == [("row 1", "wrong_type")]
    damaged = parquet([{"text": b"a"}, {"text": b"\xff"}, {"text": b"b"}, {"text": b"\xfe"}])
    assert errors(small_api, damaged, "a.parquet") == [("row 2", "not_utf8"), ("row 4", "not_utf8")]
    assert errors(small_api, parquet([{"other": 1}]), "a.parquet") == [("file", "unknown_format")]


def test_texts_that_parquet_stores_as_bytes_are_texts(shared_api: ApiServer) -> None:
    message = {"role": b"assistant", "content": "grün".encode()}
    row = {"messages": [message], "tags": [b"a", b"\xff"], "raw": b"\xff", "note": b"x", "none": b""}
    stored = {"messages": [{"role": "assistant", "content": "grün"}], "tags": ["a", "/w=="], "raw": "/w==", "note": "x"}
    assert stored_rows(shared_api, parquet([row]), "a.parquet") == [stored]
    assert stored_rows(shared_api, parquet([{"text": b"a"}], use_dictionary=["text"]), "a.parquet") == [{"text": "a"}]


def test_numbers_that_are_not_finite_are_null_where_they_are_not_used(shared_api: ApiServer) -> None:
    line = b'{"text": "NaN", "score": NaN, "more": [Infinity, 1.5]}'
    row = {"text": "NaN", "score": None, "more": [None, 1.5]}
    assert stored_rows(shared_api, line) == stored_rows(shared_api, b"[" + line + b"]", "a.json") == [row]
    assert stored_rows(shared_api, parquet([{"text": "a", "n": float("nan")}]), "a.parquet") == [{"text": "a"}]


def test_joined_files_and_headers_with_spaces_are_read(shared_api: ApiServer) -> None:
    mark = b"\xef\xbb\xbf"
    assert stored_rows(shared_api, (mark + b'{"text": "a"}\n') * 3) == [{"text": "a"}] * 3
    table = mark + b"prompt, completion \na, b\n" + mark + b"c,d\n"
    rows = [{"prompt": "a", "completion": " b"}, {"prompt": "c", "completion": "d"}]
    assert stored_rows(shared_api, table, "a.csv") == rows
    renamed = table.replace(b"prompt, completion", b"question, answer")
    mapping = json.dumps({"prompt": "question", "completion": " answer "})
    assert stored_rows(shared_api, renamed, "a.csv", columns=mapping) == rows
    assert errors(shared_api, b"text, text\na,b\n", "a.csv") == [("line 1", "duplicate_column")]


def test_columns_of_parquet_with_one_name_are_refused(shared_api: ApiServer) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), file)
    assert errors(shared_api, file.getvalue(), "a.parquet") == [("file", "unreadable_parquet")]


def test_parquet_that_grows_without_end_is_refused(settings: Settings) -> None:
    """A few kilobytes that say the same 100,000 bytes three hundred times."""
    bomb = parquet([{"text": "x" * 100_000}] * 300, compression="zstd")
    assert len(bomb) < 10_000
    with ThreadServer(settings.model_copy(update={"max_upload_bytes": 10_000_000})) as api:
        answer = upload(api, bomb, "a.parquet")
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
        assert list(settings.storage_root.glob("*/*")) == []


def test_a_cell_that_takes_far_more_memory_than_the_file_is_refused(shared_api: ApiServer) -> None:
    """Ten million zeros in one cell, which are few bytes in the file."""
    zeros = pa.ListArray.from_arrays(
        pa.array([0, 10_000_000], pa.int32()), pa.nulls(10_000_000, pa.int64()).fill_null(0)
    )
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"], "x": zeros}), file, compression="zstd")
    assert len(file.getvalue()) < 1_000_000
    answer = upload(shared_api, file.getvalue(), "a.parquet")
    assert answer.json()["errors"][0]["code"] == "unreadable_parquet", answer.text


@pytest.fixture(scope="module")
def small_api(shared_api: ApiServer) -> Any:
    """An API on the same database and storage that takes rows of a thousand bytes."""
    with ThreadServer(shared_api.settings.model_copy(update={"max_line_bytes": 1024})) as api:
        yield api


def test_a_flood_of_empty_cells_in_a_small_parquet_file_is_not_read(settings: Settings, tmp_path: Path) -> None:
    """Columns without a value cost nothing in the file, and as JSON their names in every row."""
    names = [f"c{number}".ljust(150, "x") for number in range(200)]
    rows = [{"text": "t", **dict.fromkeys(names[::2], ""), **dict.fromkeys(names[1::2])} for _ in range(1000)]
    small = settings.model_copy(update={"max_upload_bytes": 300_000, "home": tmp_path})
    receiving = DatasetImporter(tmp_path, small, ImportOptions())
    receiving.begin_file("x.parquet")
    receiving.feed(parquet(rows, compression="zstd"))
    receiving.end_file()
    while receiving.read_more():
        pass
    assert receiving.finish_dataset("x").bytes == 1000 * len(b'{"text": "t"}\n')
    receiving.close()


def test_what_is_read_of_a_parquet_file_is_bounded_as_an_upload_is(settings: Settings, tmp_path: Path) -> None:
    rows = [{"text": "t", "c": "x" * 1000}] * 1000
    receiving = DatasetImporter(tmp_path, settings.model_copy(update={"max_upload_bytes": 300_000}), ImportOptions())
    receiving.begin_file("x.parquet")
    receiving.feed(parquet(rows))
    receiving.end_file()
    with pytest.raises(ApiError, match="converted to JSONL"):
        while receiving.read_more():
            pass
    receiving.close()
