"""`client.datasets`."""

import io
import json
import shutil
import tempfile
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO, cast

import httpx

from app.client.modes import M, call, stream
from app.client.resource import ApiResource, given
from app.client.transport import understood
from app.datasets.schemas import DatasetSummary, DatasetView

# Once all is sent or named, nothing comes until all is fetched, read and counted: the service allows itself that long.
_TIMEOUT = httpx.Timeout(10.0, read=5400.0, write=60.0)


class Datasets(ApiResource[M]):
    """Files of training rows."""

    @call
    async def upload(
        self,
        file: str | Path | bytes,
        *,
        name: str | None = None,
        format: str | None = None,
        file_format: str | None = None,
        columns: Mapping[str, str] | None = None,
        tokenizer: str | None = None,
        told: Callable[[int], None] | None = None,
        idempotency_key: str | None = None,
    ) -> DatasetView:
        """Upload a file, by its path or as bytes (of JSONL); every row is checked, and all is kept or nothing.

        `file_format` (jsonl, json, csv, parquet) says what the file is where its name does not. `columns` tells
        for columns of ours what the file calls them. `tokenizer` names the model to count tokens with.
        `told` is called with the number of bytes sent so far.
        """
        fields = given(
            name=name, format=format, file_format=file_format, tokenizer=tokenizer,
            columns=None if columns is None else json.dumps(dict(columns)),
        )  # fmt: skip
        with _opened(file) as opened:
            request = self._session.transport.build(
                "POST", "/datasets", data=fields,
                files={"file": (_file_name(file), _Counted(opened, told) if told else opened)},
                headers={"Idempotency-Key": idempotency_key or str(uuid.uuid4())}, timeout=_TIMEOUT,
            )  # fmt: skip
            return understood(DatasetView, await self._session.fetch(request, repeatable=True))

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
        """Let the service fetch a split (`train` unless another is named) of the hub's data set `owner/name`."""
        body = given(
            hub=hub, split=split, subset=subset, revision=revision, name=name, format=format, columns=columns,
            tokenizer=tokenizer,
        )  # fmt: skip
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        answer = await self._session.request(
            "POST", "/datasets", repeatable=True, json=body, headers=headers, timeout=_TIMEOUT
        )
        return understood(DatasetView, answer)

    @stream
    async def list(self, *, limit: int | None = None, after: str | None = None) -> AsyncGenerator[DatasetSummary]:
        """Data sets, newest first; page after page is fetched as you go on."""
        async with aclosing(self._items("/datasets", DatasetSummary, {}, limit, after)) as items:
            async for item in items:
                yield item

    @call
    async def get(self, dataset_id: str) -> DatasetView:
        """A data set with its first rows."""
        return await self._session.get(DatasetView, f"/datasets/{dataset_id}")

    @stream
    async def content(self, dataset_id: str) -> AsyncGenerator[bytes]:
        """The rows as they are kept, as JSONL in pieces, whatever kind of file they came in."""
        transport = self._session.transport
        request = transport.build("GET", f"/datasets/{dataset_id}/content")
        response = await self._session.send(request, repeatable=True)
        try:
            async with aclosing(transport.chunks(response)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            await transport.release(response)

    @call
    async def delete(self, dataset_id: str) -> None:
        """Delete a data set that no run uses."""
        await self._session.request("DELETE", f"/datasets/{dataset_id}")


class _Counted(io.RawIOBase):
    """A file that tells how far it has been read; from its beginning again when the request is repeated."""

    def __init__(self, file: BinaryIO, told: Callable[[int], None]) -> None:
        self._file = file
        self._told = told

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        piece = self._file.read(size)
        self._told(self._file.tell())
        return piece

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _opened(file: str | Path | bytes) -> BinaryIO:
    if isinstance(file, bytes):
        return io.BytesIO(file)
    path = Path(file)
    if path.is_file() or path.is_dir():
        return path.open("rb")
    # Of a pipe neither the size is known nor can it be read again, should the connection break.
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - whoever asked closes it
    with path.open("rb") as pipe:
        shutil.copyfileobj(pipe, copy)
    copy.seek(0)
    return cast(BinaryIO, copy)


def _file_name(file: str | Path | bytes) -> str:
    return "rows.jsonl" if isinstance(file, bytes) else Path(file).name
