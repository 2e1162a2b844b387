"""Promises about the rows that a page shows of a dataset."""

import json
from pathlib import Path

import pytest

from app.api.errors import ApiError
from app.datasets import rows
from tests.app.uploads import lines, upload
from tests.server import ApiServer


def test_pages_follow_each_other_and_equal_the_file(shared_api: ApiServer) -> None:
    written = [{"text": f"row {number}: <b>ä</b>"} for number in range(45)]
    dataset = upload(shared_api, lines(*written)).json()["id"]
    read, after = [], None
    while True:
        query = {"limit": 20} | ({} if after is None else {"after": after})
        page = shared_api.client.get(f"/v1/datasets/{dataset}/rows", params=query).json()
        read += page["data"]
        after = page["next"]
        assert page["has_more"] is (after is not None)
        if after is None:
            break
    assert [one["line"] for one in read] == list(range(1, 46)) and [one["row"] for one in read] == written


_FAR = ["99.99999999", "1.9223372036854775808", "1." + "9" * 31]


@pytest.mark.parametrize("cursor", ["x", "1", "1.", "-1.5", "1.3", "1.²", *_FAR])
def test_a_cursor_that_is_none_is_refused(tmp_path: Path, cursor: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(ApiError) as refused:
        rows.read_rows(file.open("rb"), cursor, 10)
    assert refused.value.errors[0].code == "unknown_cursor"


def test_long_values_are_cut_and_large_rows_end_a_page(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    row = {"text": "x" * 100_000, "list": list(range(1000)), "deep": {"a": ["y" * 5000]}}
    wide_row = {f"column {number}": "z" * 2000 for number in range(50)}
    file.write_text("".join(json.dumps(one) + "\n" for one in (row, *[wide_row] * 20)))
    first = rows.read_rows(file.open("rb"), None, 1).data[0].row
    assert len(first["text"]) < 2100 and len(first["list"]) == 51 and len(first["deep"]["a"][0]) < 2100
    page = rows.read_rows(file.open("rb"), None, 100)
    assert 2 <= len(page.data) < 10 and page.has_more and page.next is not None
    assert rows.read_rows(file.open("rb"), page.next, 1).data[0].line == page.data[-1].line + 1


def test_a_nested_row_and_an_object_of_many_keys_are_cut_with_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    nested = {str(a): {str(b): {str(c): "x" * 1000 for c in range(40)} for b in range(40)} for a in range(3)}
    keys = {str(number): None for number in range(60)}
    file.write_text("".join(json.dumps(one) + "\n" for one in (nested, keys)))
    page = rows.read_rows(file.open("rb"), None, 2).data
    assert len(json.dumps(page[0].row)) < 200_000 and page[0].row["…"] == "… (cut)"
    assert list(page[1].row) == [*map(str, range(50)), "…"]
