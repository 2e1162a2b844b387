"""Response that sends an open file, whole or the requested ranges: a local file or one of an object store."""

import hashlib
import os
import stat
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, BinaryIO

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from app.infra.files.object_store import StoredFile
from app.infra.files.store_calls import StoreCalls

_STORED_CHUNK_BYTES = 2**20


class OpenFileResponse(FileResponse):
    """Response from an open file, so that the file sent is the file that was checked, and errors come before it."""

    def __init__(
        self,
        file: BinaryIO | StoredFile,
        calls: StoreCalls | None = None,
        *,
        filename: str,
        media_type: str = "application/octet-stream",
        modified: float = 0.0,
        headers: Mapping[str, str] | None = None,
        sha256: str | None = None,
    ) -> None:
        """Take over the open file; `calls`, `modified` and `sha256` are for one of an object store.

        `modified` is in seconds since 1970. The connection is cut before the end of a whole file with another digest.
        """
        if isinstance(file, StoredFile):
            about = os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, file.size, modified, modified, modified))
            path = filename
        else:
            about = os.fstat(file.fileno())
            path = f"/proc/self/fd/{file.fileno()}"
        common = {"X-Content-Type-Options": "nosniff", "Cache-Control": "private, no-store"}
        super().__init__(
            path, media_type=media_type, filename=filename, stat_result=about, headers={**common, **(headers or {})}
        )
        self._stored = None
        if isinstance(file, StoredFile) and calls is not None:
            self._stored = _StoredContent(file, calls, sha256)
            self.chunk_size = _STORED_CHUNK_BYTES
        # A thread may read the stored file when the reader has gone: closing it would wait for that.
        self._close = None if self._stored is not None else weakref.finalize(self, file.close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._close is not None:
                self._close()

    @asynccontextmanager
    async def _open_file(self) -> AsyncIterator[Any]:
        if self._stored is None:
            async with super()._open_file() as file:
                yield file
        else:
            yield self._stored


class CorruptContent(Exception):
    """Content that is not what was stored."""


class _StoredContent:
    """Content of a file of an object store, with the methods that a response uses."""

    def __init__(self, file: StoredFile, calls: StoreCalls, sha256: str | None) -> None:
        self._file, self._calls, self._sha256 = file, calls, sha256
        self._digest = hashlib.sha256()
        self._position = self._digested = 0

    async def read(self, size: int) -> bytes:
        content = await self._calls.run(self._file.read, size)
        if self._position == self._digested:
            self._digest.update(content)
            self._digested += len(content)
        self._position += len(content)
        is_whole = self._digested == self._position == self._file.size
        if is_whole and self._sha256 is not None and self._digest.hexdigest() != self._sha256:
            raise CorruptContent("the object store has returned other bytes than were stored there")
        return content

    async def seek(self, offset: int) -> int:
        self._position = self._file.seek(offset)
        return self._position
