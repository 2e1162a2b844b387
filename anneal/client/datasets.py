"""Methods of `client.datasets`."""

import io
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, BinaryIO, cast

import httpx

from anneal.client.api_resource import ApiResource, without_none
from anneal.client.sync_async import M, call, stream
from anneal.client.transport import parse_response
from anneal.contracts.schemas.datasets import DatasetSummary, DatasetView

# The service responds only after it has downloaded, parsed and counted everything; this is its own time limit.
_TIMEOUT = httpx.Timeout(10.0, read=5400.0, write=60.0)


class Datasets(ApiResource[M]):
    """Datasets: files of training rows."""

    @call
    async def upload(
        self,
        file: str | Path | bytes | BinaryIO,
        *,
        name: str | None = None,
        format: str | None = None,
        file_format: str | None = None,
        columns: Mapping[str, str] | None = None,
        tokenizer: str | None = None,
        on_progress: Callable[[int], None] | None = None,
        idempotency_key: str | None = None,
    ) -> DatasetView:
        """Upload a file; every row is validated, and one bad row rejects the file.

        `file` is a path, JSONL as bytes, or an open file such as `sys.stdin.buffer`, which is copied to disk first.
        `file_format` (jsonl, json, csv, tsv, parquet) is required if the file name does not show it. `columns` maps the
        columns of the dataset format to those of the file. `tokenizer` names the model whose tokenizer counts tokens.
        `on_progress` is called with the number of bytes sent so far.
        """
        fields = without_none(
            name=name, format=format, file_format=file_format, tokenizer=tokenizer,
            columns=None if columns is None else json.dumps(dict(columns)),
        )  # fmt: skip
        with _open_source(file) as opened:
            request = self._session.transport.build_request(
                "POST", "/datasets", data=fields,
                files={"file": (_file_name(file), _Counted(opened, on_progress) if on_progress else opened)},
                headers={"Idempotency-Key": idempotency_key or str(uuid.uuid4())}, timeout=_TIMEOUT,
            )  # fmt: skip
            return parse_response(DatasetView, await self._session.fetch_body(request, repeatable=True))

    @call
    async def load_from_hub(
        self,
        hub: str,
        *,
        split: str | None = None,
        subset: str | None = None,
        revision: str | None = None,
        name: str | None = None,
        format: str | None = None,
        columns: Mapping[str, str] | None = None,
        tokenizer: str | None = None,
        idempotency_key: str | None = None,
    ) -> DatasetView:
        """Import a split (default `train`) of the dataset `owner/name` from the Hugging Face Hub."""
        body = without_none(
            hub=hub, split=split, subset=subset, revision=revision, name=name, format=format, columns=columns,
            tokenizer=tokenizer,
        )  # fmt: skip
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        answer = await self._session.request(
            "POST", "/datasets", repeatable=True, json=body, headers=headers, timeout=_TIMEOUT
        )
        return parse_response(DatasetView, answer)

    @call
    async def mix(
        self,
        name: str,
        sources: Sequence[Mapping[str, Any]],
        *,
        stopping_strategy: str | None = None,
        seed: int | None = None,
        idempotency_key: str | None = None,
    ) -> DatasetView:
        """Make a dataset of rows of others; each source is `{"dataset_id": …, "weight": …, "weight_column": …}`.

        Without weights the sources follow each other. With weights the rows are those of
        `datasets.interleave_datasets`; `stopping_strategy` is `first_exhausted` (default) or `all_exhausted`.
        """
        body = without_none(
            name=name, sources=[dict(source) for source in sources], stopping_strategy=stopping_strategy, seed=seed
        )
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        answer = await self._session.request(
            "POST", "/datasets/mix", repeatable=True, json=body, headers=headers, timeout=_TIMEOUT
        )
        return parse_response(DatasetView, answer)

    @stream
    async def list(
        self,
        *,
        find: str | None = None,
        file_sha256: str | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[DatasetSummary]:
        """Iterate over datasets, newest first; pages are fetched on demand.

        `find` selects datasets whose id starts with this text, or whose name is it; `file_sha256` those of a file with
        this content.
        """
        filters = {"find": find, "file_sha256": file_sha256}
        async with aclosing(self._iterate_items("/datasets", DatasetSummary, filters, limit, after)) as items:
            async for item in items:
                yield item

    @call
    async def get(self, dataset_id: str) -> DatasetView:
        """Return a dataset with its first rows."""
        return await self._session.get(DatasetView, f"/datasets/{dataset_id}")

    @stream
    async def content(self, dataset_id: str) -> AsyncGenerator[bytes]:
        """Iterate over the stored rows as chunks of JSONL, independent of the uploaded file format."""
        transport = self._session.transport
        request = transport.build_request("GET", f"/datasets/{dataset_id}/content")
        response = await self._session.send_repeatedly(request, repeatable=True)
        try:
            async with aclosing(transport.iterate_chunks(response)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            await transport.close_response(response)

    @call
    async def delete(self, dataset_id: str) -> None:
        """Delete a dataset that no run uses."""
        await self._session.request("DELETE", f"/datasets/{dataset_id}")


class _Counted(io.RawIOBase):
    """File that reports its read position; restarts from zero when the request is retried."""

    def __init__(self, file: BinaryIO, on_progress: Callable[[int], None]) -> None:
        self._file = file
        self._on_progress = on_progress

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        piece = self._file.read(size)
        self._on_progress(self._file.tell())
        return piece

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _open_source(file: str | Path | bytes | BinaryIO) -> BinaryIO:
    if isinstance(file, bytes):
        return io.BytesIO(file)
    if not isinstance(file, str | Path):
        return _copy_of(file)
    path = Path(file)
    if path.is_file() or path.is_dir():
        return path.open("rb")
    with path.open("rb") as pipe:
        return _copy_of(pipe)


def _copy_of(pipe: BinaryIO) -> BinaryIO:
    """Return a temporary copy: a pipe has no known size, and a retry could not read it again."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    shutil.copyfileobj(pipe, copy)
    copy.seek(0)
    return cast(BinaryIO, copy)


def _file_name(file: str | Path | bytes | BinaryIO) -> str:
    if isinstance(file, bytes):
        return "rows.jsonl"
    if not isinstance(file, str | Path):
        return "stdin"
    return os.fsencode(Path(file).name).decode(errors="replace")  # names of files need not be text
