"""Bytes for an append-only file of a training process, which does not end because the disk is full."""

import os

from app.infra.files.disk_space import FULL

_MOST_BYTES = 16 * 2**20


class WaitingBytes:
    """Bytes that a full disk did not take, in order; they are written with those that follow them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __bytes__(self) -> bytes:
        return bytes(self._bytes)

    def __len__(self) -> int:
        return len(self._bytes)

    def append(self, descriptor: int, data: bytes) -> None:
        """Write to the end of a file what waits, then `data`; what the disk does not take waits.

        Raises:
            OSError: Writing fails for another reason, or more than 16 MiB wait.
        """
        self._bytes += data
        try:
            while self._bytes:
                del self._bytes[: os.write(descriptor, self._bytes)]
        except OSError as error:
            if error.errno not in FULL or len(self._bytes) > _MOST_BYTES:
                raise
