"""Parts of stored files, compared with what was stored before they are used.

The database and the manifests have one SHA-256 of each file, which says nothing about a part of it. Once a file was
read whole and had that SHA-256, the digests of its pieces are known, and each piece is compared with its own.
"""

import asyncio
import hashlib
import io
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, BinaryIO

from app.infra.files.object_store import StoreBusy, StoredFile
from app.infra.files.store_calls import StoreCalls

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PIECE_BYTES = 2**20
_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_DIGEST_BYTES = 64 * 2**20
"""Memory for digests, enough for those of files of 2 TiB together."""
_READS, _READ_WAIT_SECONDS = 4, 60.0
_MAX_COMPARISONS = 8
"""Comparisons at the same time; each goes on when its request has ended."""


class CorruptContent(OSError):
    """Content that is not what was stored."""


class PieceDigests:
    """Computes the digests of the pieces of a file while it is read whole."""

    def __init__(self, size: int, sha256: str | None) -> None:
        self._size, self._sha256 = size, sha256
        self._whole = hashlib.sha256()
        self._pieces = bytearray()
        self._bytes = 0

    def add_piece(self, piece: bytes) -> bytes | None:
        """Add the next piece; return the digests of all with the last one.

        Raises:
            CorruptContent: The piece is too short, or is the last one of a file with another SHA-256.
        """
        if len(piece) != min(PIECE_BYTES, self._size - self._bytes):
            raise CorruptContent("the store has returned less than was stored there")
        self._whole.update(piece)
        self._pieces += hashlib.sha256(piece).digest()
        self._bytes += len(piece)
        if self._bytes < self._size:
            return None
        if self._whole.hexdigest() != self._sha256:
            raise CorruptContent("the store has returned other bytes than were stored there")
        return bytes(self._pieces)


class _VerifiedFile(io.RawIOBase):
    """File of which each piece is compared before anything of it is returned."""

    def __init__(self, file: StoredFile, digests: bytes) -> None:
        super().__init__()
        self._file, self._digests = file, digests
        self._position = 0
        self._number, self._piece = -1, b""

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        if self._position >= self._file.size:
            return 0
        number, start = divmod(self._position, PIECE_BYTES)
        target = memoryview(buffer).cast("B")
        part = self._read_piece(number)[start : start + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _read_piece(self, number: int) -> bytes:
        if number != self._number:
            self._file.seek(number * PIECE_BYTES)
            piece = self._file.read(PIECE_BYTES)
            start = number * _DIGEST_BYTES
            if hashlib.sha256(piece).digest() != self._digests[start : start + _DIGEST_BYTES]:
                raise CorruptContent("the store has returned other bytes than were stored there")
            self._number, self._piece = number, piece
        return self._piece

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class VerifiedReads:
    """Opens files for reading in parts, for the coroutines of one event loop, and remembers the digests of pieces."""

    def __init__(self, call_seconds: float) -> None:
        """Let each read of a comparison take `call_seconds`."""
        self._calls = StoreCalls(_READS, _READ_WAIT_SECONDS, call_seconds)
        # A silent store is reported as such before a request gives up waiting for the comparison.
        self._patience = call_seconds + 1
        self._digests: OrderedDict[str, bytes] = OrderedDict()
        """Digests of pieces by the SHA-256 of the whole, the least recently used first."""
        self._comparing: dict[str, asyncio.Task[bytes]] = {}

    def knows(self, sha256: str | None) -> bool:
        """Return True if a file with this SHA-256 can be opened without reading it whole."""
        return sha256 in self._digests

    def remember(self, sha256: str, digests: bytes) -> None:
        """Store the digests of the pieces of a file that was read whole."""
        self._digests[sha256] = digests
        self._digests.move_to_end(sha256)
        while sum(map(len, self._digests.values())) > _MAX_DIGEST_BYTES and len(self._digests) > 1:
            self._digests.popitem(last=False)

    async def open_verified(self, file: StoredFile, sha256: str, *, again: bool = False) -> BinaryIO:
        """Return `file` so that whatever is read of it is what was stored.

        It is read whole if it was never compared, or `again`. Calls for the same file share a comparison. Reading
        raises `CorruptContent` and `StoreUnavailable`.

        Raises:
            CorruptContent: The file is not what was stored.
            StoreBusy: The comparison takes long. It goes on, and a later call has its result.
            StoreUnavailable: The store does not answer.
        """
        if again or (digests := self._digests.get(sha256)) is None:
            digests = await self._compare_or_join(file, sha256)
        else:
            self._digests.move_to_end(sha256)
        return io.BufferedReader(_VerifiedFile(file, digests), PIECE_BYTES)

    async def _compare_or_join(self, file: StoredFile, sha256: str) -> bytes:
        if (comparing := self._comparing.get(sha256)) is None:
            if len(self._comparing) >= _MAX_COMPARISONS:
                raise StoreBusy("other files are being compared with their SHA-256")
            comparing = self._comparing[sha256] = asyncio.create_task(self._compare(file, sha256), name="comparison")
            comparing.add_done_callback(lambda ended: self._end_comparison(sha256, ended))
        done, _ = await asyncio.wait({comparing}, timeout=self._patience)
        if not done:
            raise StoreBusy(
                "a part of a file is sent after the whole file was compared with its SHA-256, which goes on"
            )
        return comparing.result()

    async def _compare(self, file: StoredFile, sha256: str) -> bytes:
        pieces, digests = PieceDigests(file.size, sha256), None

        def add_next_piece() -> bytes | None:
            return pieces.add_piece(file.read(PIECE_BYTES))

        while digests is None:
            digests = await self._calls.run(add_next_piece)
        return digests

    def _end_comparison(self, sha256: str, ended: asyncio.Task[bytes]) -> None:
        del self._comparing[sha256]
        if not ended.cancelled() and ended.exception() is None:
            self.remember(sha256, ended.result())
