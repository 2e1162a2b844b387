"""Uploading in tests, and files of each kind made of rows."""

import io
import json
from typing import Any

import httpx
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


def kept(api: ApiServer, content: Any, name: str = "data.jsonl", **fields: str) -> list[Any]:
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
