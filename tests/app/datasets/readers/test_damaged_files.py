"""Whatever bytes come as JSON, CSV or Parquet: taken whole or refused with a reason, the same in whatever pieces."""

import csv
import io
import json
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.api.errors import ApiError
from app.config import Settings
from app.datasets.importer import DatasetImporter, ImportOptions
from app.datasets.readers.csv_table import TableReader
from app.datasets.readers.file_type import FileType
from app.datasets.readers.json_array import ArrayReader
from app.datasets.row_writer import RowWriter, TooManyBadRows
from app.infra.strict_json import BadJson, parse_json
from tests.app.uploads import parquet
from tests.properties import examples

_MOST_ROW = 4096
_BORDERS = st.lists(st.integers(0), max_size=8)
_TEXT = st.one_of(
    st.text(max_size=8), st.sampled_from(['",', "]", '"]', "\\", '\\"', "{[", "\n", "\u2028", "\ud83d\ude00"])
)
_VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), _TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=5,
)
_ROW = st.fixed_dictionaries({"text": _TEXT.map("t".__add__)}, optional={"x": _VALUE})
_WHITE = st.sampled_from(["", " ", "\n", "\r\n\t"])
_ODD = st.sampled_from(
    ["", "7", "null", "{}", '{"text": "a"', '{"text": "a"}}', '{"text": "a"]', "]", "}", '"', '{"text": "\\', "[", "[[",
     '{"text": "a", "text": "b"}', '{"text": "\\u0000"}', '{"text": "\\ud800"}', '{"text": NaN}', '{"text": "a\tb"}',
     '{"text": "' + "x" * _MOST_ROW + '"}', '{"text": ' + "[" * 3000, '{"text": "a", "d": ' + "[" * 31 + "]" * 31 + "}"]
)  # fmt: skip
_DOCUMENT = st.builds(
    lambda rows, white, comma, head, tail: head + (white + comma + white).join(rows) + white + tail,
    st.lists(st.one_of(_ROW.map(json.dumps), _ROW.map(json.dumps), _ROW.map(json.dumps), _ODD), max_size=5),
    _WHITE, st.sampled_from([",", ",", ",", ",", ",,", ""]),
    st.sampled_from(["[", "[", " [", '{"data": [', '{ "data" :[', "{", "", '{"more": 1, "data": [']),
    st.sampled_from(["]", "]", "]", "]}", "] }\n", "]]", "", "] x"]),
)  # fmt: skip


def read(kind: type[ArrayReader] | type[TableReader], pieces: list[bytes]) -> Any:
    """What is kept of a file that comes in these pieces, or what is wrong with it."""
    lines: list[bytes] = []
    rows = RowWriter("text", lines.append)
    reader = kind(rows, _MOST_ROW)
    try:
        for piece in pieces:
            reader.feed(piece)
        reader.end_file()
        errors = rows.finish_rows()
    except TooManyBadRows:
        errors = rows.errors
    for error in errors:
        assert re.fullmatch("[a-z_0-9]+", error.code) and re.fullmatch(r"(?:(?:row|line) [0-9]+)?", error.field)
        assert 0 < len(error.message) <= 300 and not re.search("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", error.message)
    return [error.model_dump() for error in errors] if errors else [json.loads(line) for line in lines]


def in_any_pieces(kind: type[ArrayReader] | type[TableReader], whole: bytes, borders: list[int]) -> Any:
    """The same answer, however the bytes come."""
    reported = read(kind, [whole])
    at = sorted(border % (len(whole) + 1) for border in borders)
    assert read(kind, [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]) == reported
    assert read(kind, [whole[n : n + 1] for n in range(len(whole))]) == reported
    return reported


@given(whole=st.one_of(_DOCUMENT.map(str.encode), st.binary(max_size=60)), borders=_BORDERS)
@example(whole=b'[{"text": "\\"]"}]', borders=[13])
@example(whole=b'[{"text": "' + b"x" * _MOST_ROW + b'"}]}', borders=[])
@example(whole=b'[{"text": "' + b"x" * _MOST_ROW + b'"} {"x": ' + b"[" * 3000, borders=[])
@example(whole=b" " * 5000 + b'[{"text": "a"}]', borders=[])
@examples(50)
def test_an_array_is_taken_exactly_when_a_strict_parser_takes_it(whole: bytes, borders: list[int]) -> None:
    reported = in_any_pieces(ArrayReader, whole, borders)
    try:
        document = parse_json(whole)
    except BadJson as error:
        # A row may be as deep as a line of JSONL; around it there is an array, and perhaps an object.
        assert "code" in reported[0] or error.code == "too_deep"
        return
    rows = document["data"] if isinstance(document, dict) and list(document) == ["data"] else document
    good = isinstance(rows, list) and rows and all(_trains(row) for row in rows)
    assert reported == rows if good else "code" in reported[0]


def _trains(row: Any) -> bool:
    fits = isinstance(row, dict) and isinstance(row.get("text"), str) and row["text"].strip() != ""
    return fits and len(json.dumps(row, ensure_ascii=False)) < _MOST_ROW


_CELL = st.one_of(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
                  st.sampled_from(['"', ",", "\n", "\r\n", '""', "a\rb", " "]))  # fmt: skip


@given(
    table=st.lists(st.tuples(_CELL.map("t".__add__), _CELL), min_size=1, max_size=6),
    end=st.sampled_from(["\n", "\r\n"]),
    borders=_BORDERS,
)
@examples(50)
def test_a_table_comes_back_as_it_was_written(table: list[tuple[str, str]], end: str, borders: list[int]) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([("text", "n"), *table])
    reported = in_any_pieces(TableReader, file.getvalue().encode(), borders)
    assert reported == [{"text": text, "n": n} if n else {"text": text} for text, n in table]


@given(
    header=st.sampled_from([b"text", b"text,n", b'"text"', b"", b"n", b"text,text", b"\xef\xbb\xbftext"]),
    body=st.one_of(
        st.binary(max_size=60),
        st.lists(
            st.sampled_from([b"a", b",", b'"', b"\n", b"\r\n", b"\r", b"\0", b"\xff", b"x" * 5000]), max_size=14
        ).map(b"".join),
    ),
    borders=_BORDERS,
)  # fmt: skip
@examples(50)
def test_any_table_is_taken_or_refused(header: bytes, body: bytes, borders: list[int]) -> None:
    reported = in_any_pieces(TableReader, header + b"\n" + body, borders)
    for row in reported:
        assert "code" in row or row["text"].strip()


@pytest.mark.parametrize(
    ("write_table", "code"),
    [
        (lambda: b"n,".join(b"%d" % n for n in range(1_500_000)) + b",1n\n", "too_many_columns"),
        (lambda: b'text\n"",' + b"," * 15_000_000 + b"\n", "wrong_cell_count"),
        (lambda: b'text\nx"' + b"," * 15_000_000 + b'"\n', "wrong_cell_count"),
    ],
    ids=["names", "empty cells", "cells in quotes"],
)
def test_a_row_of_a_million_cells_is_refused_before_they_are_taken_apart(
    write_table: Callable[[], bytes], code: str
) -> None:
    table = write_table()
    rows = RowWriter("text", len)
    reader = TableReader(rows, 16 * 1024**2)
    tracemalloc.start()
    began = time.process_time()
    try:
        reader.feed(table)
        reader.end_file()
    except TooManyBadRows:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [error.code for error in rows.errors] == [code]
    assert peak < 4 * len(table) and time.process_time() - began < 5


@pytest.mark.parametrize("cells", [1000, 1001])
def test_a_thousand_columns_are_not_too_many_whatever_is_in_the_cells(cells: int) -> None:
    header = b"text," + b",".join(b"%x" % n for n in range(1, cells)) + b"\n"
    row = b'"a,""b"",c",' + b'"x,y",' * 3 + b"," * (cells - 5) + b"\n"
    reported = read(TableReader, [header, row])
    if cells > 1000:
        assert [error["code"] for error in reported] == ["too_many_columns"]
    else:
        assert reported == [{"text": 'a,"b",c', "1": "x,y", "2": "x,y", "3": "x,y"}]


_PARQUET = [
    parquet([{"text": f"row {n}", "x": [n, None], "s": {"a": "b"}} for n in range(40)], compression=compression)
    for compression in ("none", "snappy", "zstd")
]


@given(data=st.data())
@examples(12)
def test_a_corrupt_parquet_file_is_taken_or_refused_in_few_steps(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from(_PARQUET)))
    for _ in range(data.draw(st.integers(0, 4))):
        # What is read first lies at the end.
        at = data.draw(st.one_of(st.integers(0, len(whole) - 1), st.integers(max(0, len(whole) - 900), len(whole) - 1)))
        whole[at] = data.draw(st.integers(0, 255))
    whole = whole[: data.draw(st.one_of(st.just(len(whole)), st.just(len(whole)), st.integers(0, len(whole))))]
    reported = receive(tmp_path, bytes(whole), "parquet")
    assert reported in (
        "taken",
        "bad_rows",
        "unreadable_parquet",
        "empty_file",
        "unknown_column",
        "not_utf8",
    ) or re.fullmatch("[a-z_]+", reported)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_noise_is_refused_as_any_kind(tmp_path: Path, kind: FileType) -> None:
    assert receive(tmp_path, bytes(range(256)) * 2000, kind) != "taken"


def receive(folder: Path, whole: bytes, kind: FileType) -> str:
    """`taken`, or the code of the refusal, which must be one of the caller's doing."""
    receiving = DatasetImporter(folder, Settings(home=folder), ImportOptions(file_format=kind))
    try:
        receiving.begin_file("x")
        receiving.feed(whole)
        receiving.end_file()
        # No machine is so slow that this would differ; a single step has a limit of its own.
        assert any(not receiving.read_more() for _ in range(1000))
        receiving.finish_dataset("x")
    except ApiError as error:
        assert error.status in (413, 422) and error.errors
        return error.errors[0].code
    finally:
        receiving.close()
    assert list(folder.iterdir()) == [folder / "data"]
    return "taken"


@pytest.mark.parametrize(
    "piece",
    [b'{"text": "' + b"a" * 60 + b'"},', b"x" * 100, b'"', b"\\", b"[", b'"a\\"' * 20, b"{", b" ", b"\r"],
)  # fmt: skip
@pytest.mark.parametrize("kind", [ArrayReader, TableReader])
def test_a_file_of_any_size_costs_bounded_memory_and_time(
    kind: type[ArrayReader] | type[TableReader], piece: bytes
) -> None:
    rows = RowWriter("text", len)
    reader = kind(rows, 64 * 1024)
    reader.feed(b"[" + b" " * 5000 if kind is ArrayReader else b"text\n")
    began = time.process_time()
    tracemalloc.start()
    try:
        for _ in range(40):
            reader.feed(piece * (8192 // len(piece)))
            for _ in range(50):
                reader.feed(piece)
        reader.end_file()
    except TooManyBadRows:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1024 * 1024
    assert time.process_time() - began < 10
