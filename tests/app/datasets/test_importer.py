"""The promise that a dataset of any size, of any kind, costs the API no memory."""

import csv
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.config import Settings
from tests.app.uploads import PeakMemory, framed, lines, streamed, upload
from tests.server import ApiServer, ProcessServer
from tests.slowness import slowness

_BLOCK = 1000
_CHARACTERS = 1000


def test_a_row_of_two_hundred_megabytes_costs_no_memory(settings: Settings) -> None:
    def line() -> Iterator[bytes]:
        yield b'{"text": "'
        for _ in range(200):
            yield b"x" * 1024**2
        yield b'"}\n'

    with ProcessServer(settings) as api:
        assert upload(api, lines({"text": "t"})).status_code == 201
        dataset = api.client.get("/v1/datasets").json()["data"][0]["id"]
        with PeakMemory(api.process.pid) as memory:
            answer = streamed(api, framed(line()))
        assert answer.status_code == 422, answer.text
        assert answer.json()["errors"][0]["code"] == "line_too_long"
        assert answer.json()["errors"][0]["field"] == "line 1"
        assert [path.parent.name for path in settings.storage_root.glob("datasets/*/*")] == [dataset]
    print(f"200 MB line: {memory.grown / 1e6:.0f} MB more at the peak")
    assert memory.grown < 80e6


def test_rows_of_very_many_values_cost_neither_memory_nor_a_standstill(settings: Settings) -> None:
    """Three at once, 15 MB each, as in an attack that took gigabytes and held up all others for many seconds."""
    attacks = [(f"x.{kind}", before + b"[],"  * 5_000_000 + b"0]}" + after)
               for kind, before, after in [("jsonl", b'{"text": "t", "x": [', b"\n")] * 2
               + [("json", b'[{"text": "t", "x": [', b"]")]]  # fmt: skip
    with ProcessServer(settings) as api, ThreadPoolExecutor(len(attacks)) as pool:
        assert upload(api, lines({"text": "t"})).status_code == 201
        waits = []
        with PeakMemory(api.process.pid) as memory:
            sent = [pool.submit(upload, api, content, name) for name, content in attacks]
            while not all(answer.done() for answer in sent):
                began = time.monotonic()
                assert api.client.get("/healthz").status_code == 200
                waits.append(time.monotonic() - began)
        spent = sum(psutil.Process(api.process.pid).cpu_times()[:2])
    answers = [answer.result() for answer in sent]
    assert {(answer.status_code, answer.json()["errors"][0]["code"]) for answer in answers} == {
        (422, "too_many_values")
    }
    print(f"{memory.grown / 1e6:.0f} MB more at the peak, at most {max(waits):.2f} s for others, {spent:.1f} s in all")
    assert memory.grown < 200e6
    assert max(waits) < 3 * slowness()


def test_separators_in_texts_are_no_values(shared_api: ApiServer) -> None:
    """A row of 4 MB with more commas, brackets and escapes than a row may have values."""
    text = 'x, [y], {"z": \\},\n' * 200_000
    for name, content in (("a.jsonl", lines({"text": text})), ("a.json", json.dumps([{"text": text}]).encode())):
        answer = upload(shared_api, content, name)
        assert (answer.status_code, answer.json().get("rows")) == (201, 1), answer.text[:500]


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        pytest.param("jsonl", 80, marks=pytest.mark.full),
        pytest.param("json", 20, marks=pytest.mark.full),
        pytest.param("csv", 20, marks=pytest.mark.full),
        ("parquet", 20),
    ],
)
def test_a_large_file_is_stored_once_and_costs_no_memory(
    settings: Settings, tmp_path: Path, kind: str, blocks: int
) -> None:
    print(measure(settings, tmp_path, kind, blocks))


def measure(settings: Settings, folder: Path, kind: str, blocks: int, most_growth: float = 60e6) -> str:
    """Upload that many thousand rows of a kilobyte; answers what it took."""
    content = pieces(kind, blocks, folder / "large")
    with ProcessServer(settings) as api:
        for name, small in (("a.jsonl", lines({"text": "t"})), ("a.csv", b"text\nt\n")):
            assert upload(api, small, name).status_code == 201
        started = time.monotonic()
        with PeakMemory(api.process.pid) as memory:
            answer = streamed(api, framed(content, f"x.{kind}"))
        took = time.monotonic() - started
        assert answer.status_code == 201, answer.text
        assert answer.json()["rows"] == blocks * _BLOCK
    assert memory.grown < most_growth
    size = answer.json()["bytes"] / 1e6
    return f"{kind}: {size:.0f} MB, {blocks * _BLOCK:,} rows in {took:.1f} s, {memory.grown / 1e6:.0f} MB more at most"


def rows(block: int) -> list[dict[str, Any]]:
    """A thousand rows, none like another."""
    return [{"text": f"{block * _BLOCK + n} ".ljust(_CHARACTERS, "y")} for n in range(_BLOCK)]


def pieces(kind: str, blocks: int, large: Path) -> Iterator[bytes]:
    """The bytes of a file of this kind."""
    if kind == "parquet":
        with pq.ParquetWriter(large, pa.schema([("text", pa.string())]), compression="none") as writer:
            for block in range(blocks):
                writer.write_table(pa.Table.from_pylist(rows(block)), row_group_size=100_000)
        with large.open("rb") as file:
            yield from iter(lambda: file.read(1024**2), b"")
        return
    yield {"json": b"[", "csv": b"text\r\n"}.get(kind, b"")
    for block in range(blocks):
        if kind == "csv":
            out = io.StringIO(newline="")
            csv.writer(out).writerows([row["text"]] for row in rows(block))
            yield out.getvalue().encode()
        elif kind == "json":
            yield (b",\n" if block else b"") + json.dumps(rows(block), indent=1).encode()[1:-1]
        else:
            yield lines(*rows(block))
    yield b"]" if kind == "json" else b""
