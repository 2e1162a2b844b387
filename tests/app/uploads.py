"""Uploading in tests, and files of each kind made of rows."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from tests.server import ApiServer

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def lines(*rows: Any) -> bytes:
    """JSONL, as it is kept."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    """A Parquet file."""
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, **options)
    return file.getvalue()


def upload(
    api: ApiServer, content: Any, name: str = "data.jsonl", key: str | None = None, **fields: str
) -> httpx.Response:
    """The answer to an upload; the fields go before the file."""
    headers = {} if key is None else {"Idempotency-Key": key}
    return api.client.post("/v1/datasets", files={"file": (name, content)}, data=fields, headers=headers)


def stored_rows(api: ApiServer, content: Any, name: str = "data.jsonl", **fields: str) -> list[Any]:
    """The rows that are stored of a file which must be good."""
    answer = upload(api, content, name, **fields)
    assert answer.status_code == 201, answer.text
    stored = api.client.get(f"/v1/datasets/{answer.json()['id']}/content")
    assert stored.status_code == 200 and len(stored.content) == answer.json()["bytes"]
    rows = [json.loads(line) for line in stored.content.splitlines()]
    assert len(rows) == answer.json()["rows"]
    return rows


def errors(api: ApiServer, content: Any, name: str = "data.jsonl", **fields: str) -> list[tuple[str, str]]:
    """Places and codes of what is wrong with a file which must be refused."""
    answer = upload(api, content, name, **fields)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert list(api.settings.storage_root.glob("staging/*")) == []
    return [(item["field"], item["code"]) for item in answer.json()["errors"]]


def framed(content: Iterator[bytes], name: str = "x.jsonl") -> Iterator[bytes]:
    """A multipart body with one file."""
    yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="' + name.encode() + b'"\r\n\r\n'
    yield from content
    yield b"\r\n--b--\r\n"


def streamed(api: ApiServer, body: Iterator[bytes]) -> httpx.Response:
    """The answer to a body that comes in pieces, without a length."""
    return api.client.post("/v1/datasets", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})


class PeakMemory:
    """Peak of the memory of a process beyond what it had at the start, as the kernel counts it."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._before = psutil.Process(pid).memory_info().rss
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
        self.grown = 0.0

    def __enter__(self) -> "PeakMemory":
        return self

    def __exit__(self, *_: object) -> None:
        peak = re.search(r"VmHWM:\s+(\d+) kB", self._status.read_text())
        assert peak
        self.grown = int(peak[1]) * 1024 - self._before
