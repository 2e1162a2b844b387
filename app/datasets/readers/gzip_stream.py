"""Decompression of gzip files while they are received, with a bounded expansion."""

import zlib
from collections.abc import Iterator
from typing import NoReturn

from app.datasets.row_writer import RowWriter, TooManyBadRows

_MAGIC = b"\x1f\x8b"
_PIECE_BYTES = 1024 * 1024
_INPUT_BYTES = 16 * 1024
"""Compressed bytes given to zlib at once: it copies what follows a member, and a member may have 20 bytes."""
_GZIP = 16 + zlib.MAX_WBITS
MAX_RATIO = 200
"""Maximum expansion of a file; rows of text expand to 3 to 30 times their compressed size."""
_FREE_BYTES = 16 * 1024 * 1024
"""Expanded bytes from which the ratio is checked: tiny files of equal rows expand more."""


class GzipStream:
    """Decompresses a file that starts like gzip, with all its members, and passes any other file on unchanged."""

    def __init__(self, rows: RowWriter) -> None:
        self._rows = rows
        self._start = b""
        self._is_known = False
        self._inflater: zlib._Decompress | None = None
        self._received = self._expanded = 0

    @property
    def is_gzip(self) -> bool:
        """True if the file is compressed, once its first two bytes are known."""
        return self._is_known and self._received > 0

    def decompress_pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the content of the next bytes, in pieces of at most one megabyte if they are compressed.

        Raises:
            TooManyBadRows: the data are damaged or expand too much; the error is recorded.
        """
        if not self._is_known:
            data = self._start + data
            if len(data) < len(_MAGIC) and _MAGIC.startswith(data):
                self._start = data
                return
            self._is_known = True
            if data.startswith(_MAGIC):
                self._inflater = zlib.decompressobj(_GZIP)
        if self._inflater is None and not self._received:
            yield data
            return
        self._received += len(data)
        for start in range(0, len(data), _INPUT_BYTES):
            yield from self._inflate_members(data[start : start + _INPUT_BYTES])

    def end_file(self) -> Iterator[bytes]:
        """Yield what is left at the end of the file; raises `TooManyBadRows` if the file is truncated."""
        if not self._is_known:
            yield self._start
        elif self._inflater is not None:
            self._raise_damaged("the file ends too early; upload it again")

    def _inflate_members(self, data: bytes) -> Iterator[bytes]:
        while True:
            if self._inflater is None:  # a gzip file may consist of several members, possibly padded with zeros
                data = data.lstrip(b"\0")
                if not data:
                    return
                self._inflater = zlib.decompressobj(_GZIP)
            try:
                piece = self._inflater.decompress(data, _PIECE_BYTES)
            except zlib.error as error:
                self._raise_damaged(f"the file is damaged ({error}); compress and upload it again")
            self._expanded += len(piece)
            if self._expanded > _FREE_BYTES and self._expanded > MAX_RATIO * self._received:
                message = f"the file expands to more than {MAX_RATIO} times its size; upload it uncompressed"
                self._rows.record_error("", "expands_too_much", message)
                raise TooManyBadRows
            data = self._inflater.unconsumed_tail
            if self._inflater.eof:
                data = self._inflater.unused_data
                self._inflater = None
            yield piece
            if not data and len(piece) < _PIECE_BYTES:
                return

    def _raise_damaged(self, why: str) -> NoReturn:
        self._rows.record_error("", "unreadable_gzip", f"gzip: {why}")
        raise TooManyBadRows
