"""Parts of stored files, compared with what was stored before they are used.

The database and the manifests have one SHA-256 of each file, which says nothing about a part of it. Once a file was
read whole and had that SHA-256, the digests of its pieces are known, and each piece is compared with its own. Those of
large files are stored, so that no process reads these whole after a restart.
"""

import asyncio
import hashlib
import io
import json
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from app.infra.files.object_store import StoreBusy, StoredFile, StoreUnavailable
from app.infra.files.store_calls import StoreCalls
from app.infra.private_files import try_write_private_json

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = logging.getLogger(__name__)

PIECE_BYTES = 2**20
_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_DIGEST_BYTES = 64 * 2**20
"""Memory and disk for digests, enough for those of files of 2 TiB together."""
_LARGE_BYTES = 32 * 2**20
"""Size from which the digests of a file are stored."""
_READS, _READ_WAIT_SECONDS = 4, 60.0
_MAX_COMPARISONS = 8
"""Comparisons at the same time; each goes on when its request has ended."""
_MAX_INTERRUPTED = 100


class CorruptContent(OSError):
    """Content that is not what was stored."""


class PieceDigests:
    """Computes the digests of the pieces of a file while it is read whole."""

    def __init__(self, size: int, sha256: str | None) -> None:
        self.size, self._sha256 = size, sha256
        self._whole = hashlib.sha256()
        self._pieces = bytearray()
        self.position = 0
        """Position of the next piece."""

    def add_piece(self, piece: bytes) -> bytes | None:
        """Add the next piece; return the digests of all with the last one.

        Raises:
            CorruptContent: The piece is too short, or is the last one of a file with another SHA-256.
        """
        if len(piece) != min(PIECE_BYTES, self.size - self.position):
            raise CorruptContent("the store has returned less than was stored there")
        self._whole.update(piece)
        self._pieces += hashlib.sha256(piece).digest()
        self.position += len(piece)
        if self.position < self.size:
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


class DigestFolder:
    """Digests of the pieces of large files, each in a file that is named by the SHA-256 of the whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_digests(self, sha256: str, size: int) -> bytes | None:
        """Return the digests of a file of this size; None if they are not here or damaged."""
        try:
            stored = json.loads((self._folder / sha256).read_bytes())
            digests = bytes.fromhex(stored["digests"])
            is_intact = hashlib.sha256(digests).hexdigest() == stored["sha256"]
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return digests if is_intact and len(digests) == -(-size // PIECE_BYTES) * _DIGEST_BYTES else None

    def write_digests(self, sha256: str, digests: bytes) -> None:
        """Store the digests of a file, and remove the oldest ones if there are too many."""
        stored = {"digests": digests.hex(), "sha256": hashlib.sha256(digests).hexdigest()}
        if not try_write_private_json(self._folder / sha256, stored, durable=False):
            return
        try:
            oldest_first = sorted((entry.stat().st_mtime, entry) for entry in self._folder.iterdir())
            total = sum(entry.stat().st_size for _, entry in oldest_first)
            for _, entry in oldest_first[:-1]:
                if total <= 2 * _MAX_DIGEST_BYTES:  # as hexadecimal digits
                    break
                total -= entry.stat().st_size
                entry.unlink()
        except OSError as error:  # such as another process that does the same
            log.info("old digests in %s are not removed now: %s", self._folder, error.strerror)


class VerifiedReads:
    """Opens files for reading in parts, for the coroutines of one event loop, and remembers the digests of pieces."""

    def __init__(self, call_seconds: float, stored_digests: DigestFolder) -> None:
        """Let each read of a comparison take `call_seconds`."""
        self._calls = StoreCalls(_READS, _READ_WAIT_SECONDS, call_seconds)
        # A silent store is reported as such before a request gives up waiting for the comparison.
        self._patience = call_seconds + 1
        self._digests: OrderedDict[str, bytes] = OrderedDict()
        """Digests of pieces by the SHA-256 of the whole, the least recently used first."""
        self._stored_digests = stored_digests
        self._interrupted: OrderedDict[str, PieceDigests] = OrderedDict()
        """Comparisons that the store has interrupted, to be continued; the oldest first."""
        self._comparing: dict[str, asyncio.Task[bytes]] = {}

    def knows(self, sha256: str | None) -> bool:
        """Return True if a file with this SHA-256 can be opened without reading it whole."""
        return sha256 in self._digests

    def remember(self, sha256: str, digests: bytes) -> None:
        """Store the digests of the pieces of a file that was read whole."""
        self._keep_in_memory(sha256, digests)
        if len(digests) >= _LARGE_BYTES // PIECE_BYTES * _DIGEST_BYTES:
            self._stored_digests.write_digests(sha256, digests)

    def _keep_in_memory(self, sha256: str, digests: bytes) -> None:
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
        digests = None if again else await self._find_digests(file, sha256)
        if digests is None:
            digests = await self._compare_or_join(file, sha256)
        return io.BufferedReader(_VerifiedFile(file, digests), PIECE_BYTES)

    async def _find_digests(self, file: StoredFile, sha256: str) -> bytes | None:
        digests = self._digests.get(sha256)
        if digests is None and file.size >= _LARGE_BYTES:
            digests = await asyncio.to_thread(self._stored_digests.read_digests, sha256, file.size)
        if digests is not None:
            self._keep_in_memory(sha256, digests)
        return digests

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
        pieces, digests = self._continue_or_begin(file, sha256), None

        def read_next_piece() -> bytes:
            file.seek(pieces.position)
            return file.read(PIECE_BYTES)

        try:
            while digests is None:
                piece = await self._calls.run(read_next_piece)
                # Not in the call, which goes on when it has taken too long.
                digests = await asyncio.to_thread(pieces.add_piece, piece)
        except StoreUnavailable:
            self._interrupted[sha256] = pieces
            if len(self._interrupted) > _MAX_INTERRUPTED:
                self._interrupted.popitem(last=False)
            raise
        return digests

    def _continue_or_begin(self, file: StoredFile, sha256: str) -> PieceDigests:
        interrupted = self._interrupted.pop(sha256, None)
        return interrupted if interrupted and interrupted.size == file.size else PieceDigests(file.size, sha256)

    def _end_comparison(self, sha256: str, ended: asyncio.Task[bytes]) -> None:
        del self._comparing[sha256]
        if not ended.cancelled() and ended.exception() is None:
            self.remember(sha256, ended.result())
