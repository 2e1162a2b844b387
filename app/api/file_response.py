"""Responses that send an open file, whole or the requested ranges: a local file or one of an object store."""

import os
import stat
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, BinaryIO

from starlette.datastructures import Headers
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from app.api.errors import ApiError, ResponseCut, as_api_error
from app.infra.files.object_store import ObjectMissing, StoredFile, StoreUnavailable
from app.infra.files.verified_reads import PIECE_BYTES, CorruptContent, PieceDigests
from app.infra.storage import Storage

COMPARED_FIRST_BYTES = 32 * 2**20
"""Maximum size of what is read and compared before a response begins, and then read again while it is sent."""
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "private, no-store"}


class OpenFileResponse(FileResponse):
    """Response from an open file, so that the file sent is the file that was checked, and errors come before it."""

    def __init__(
        self,
        file: BinaryIO,
        *,
        filename: str,
        media_type: str = "application/octet-stream",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Take over the open file."""
        super().__init__(
            f"/proc/self/fd/{file.fileno()}",
            media_type=media_type,
            filename=filename,
            stat_result=os.fstat(file.fileno()),
            headers={**_HEADERS, **(headers or {})},
        )
        self._close = weakref.finalize(self, file.close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


class StoredFileResponse(FileResponse):
    """Response from a file of an object store, which is never complete with other bytes than were stored.

    A small file is compared with its SHA-256 before the response begins. Ranges are sent once the whole file was
    compared, and each piece is compared once more before it is sent. A large file that was never compared is compared
    while it is sent whole: the connection is cut before the last piece of one that differs.
    """

    chunk_size = PIECE_BYTES

    def __init__(
        self,
        file: StoredFile,
        storage: Storage,
        sha256: str,
        corrupt_error: ApiError,
        *,
        filename: str,
        modified: float,
        media_type: str = "application/octet-stream",
    ) -> None:
        """Take over the open file; `corrupt_error` is raised if it is not what was stored.

        `modified` is in seconds since 1970.
        """
        about = os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, file.size, modified, modified, modified))
        headers = {**_HEADERS, "ETag": f'"{sha256}"'}
        super().__init__(filename, media_type=media_type, filename=filename, stat_result=about, headers=headers)
        # Never closed here: a thread may read it when the client has gone, and closing it would wait for that.
        self._file, self._storage, self._sha256, self._corrupt_error = file, storage, sha256, corrupt_error
        self._content: _StoredContent | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        waiting: list[Message] = []
        is_started = False

        async def send_start_late(message: Message) -> None:
            """Send nothing before the first bytes are read, so that an error until then has a status of its own."""
            nonlocal is_started
            waiting.append(message)
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last or (self._content is not None and self._content.was_read):
                is_started = True
                while waiting:
                    await send(waiting.pop(0))

        try:
            self._content = await self._open_content(is_ranged="range" in Headers(scope=scope))
            await super().__call__(scope, receive, send_start_late)
        except (CorruptContent, ObjectMissing, StoreUnavailable) as error:
            reason = as_api_error(error) or self._corrupt_error
            if not is_started:
                raise reason from error
            raise ResponseCut(f"{self._storage.name}/{self._file.key}: {reason}") from error

    async def _open_content(self, *, is_ranged: bool) -> "_StoredContent":
        reads, is_small = self._storage.verified_reads, self._file.size <= COMPARED_FIRST_BYTES
        if is_ranged or is_small or reads.knows(self._sha256):
            again = is_small and not is_ranged
            return _StoredContent(self._storage, await reads.open_verified(self._file, self._sha256, again=again))
        return _WholeContent(self._storage, self._file, self._sha256)

    @asynccontextmanager
    async def _open_file(self) -> AsyncIterator[Any]:
        yield self._content


class _StoredContent:
    """Content with the methods that a response uses."""

    def __init__(self, storage: Storage, file: BinaryIO | StoredFile) -> None:
        self._storage, self._file = storage, file
        self.was_read = False

    async def read(self, size: int) -> bytes:
        content = await self._storage.in_thread(self._file.read, size)
        self.was_read = True
        return content

    async def seek(self, offset: int) -> int:
        return self._file.seek(offset)


class _WholeContent(_StoredContent):
    """Content that is read from its beginning to its end, and compared with its SHA-256 at the end."""

    def __init__(self, storage: Storage, file: StoredFile, sha256: str) -> None:
        super().__init__(storage, file)
        self._sha256 = sha256
        self._pieces = PieceDigests(file.size, sha256)
        self._is_compared = False

    async def read(self, size: int) -> bytes:
        if self._is_compared:
            return b""
        piece, digests = await self._storage.in_thread(self._read_piece, size)
        self.was_read = True
        if digests is not None:
            self._is_compared = True
            self._storage.verified_reads.remember(self._sha256, digests)
        return piece

    def _read_piece(self, size: int) -> tuple[bytes, bytes | None]:
        piece = self._file.read(size)
        return piece, self._pieces.add_piece(piece)
