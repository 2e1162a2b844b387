"""A folder as a tar archive, made while it is sent: nothing is written, and little is held."""

import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.artifacts.service import files
from app.storage import OutsideStorage, Storage

_PIECE = 1024 * 1024
_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Member:
    """A file with its header; its size is fixed with that."""

    path: str
    """Below the folder."""
    header: bytes
    size: int

    @property
    def padding(self) -> int:
        """Bytes that fill its last block."""
        return -self.size % tarfile.BLOCKSIZE


def members(folder: Path, name: str) -> list[Member]:
    """All files below `folder` in order of their paths, in the archive below `name`; links are left out."""
    found = []
    for path, size in sorted(files(folder)):
        below = path.relative_to(folder).as_posix()
        info = tarfile.TarInfo(f"{name}/{below}")
        info.size, info.mode, info.mtime = size, 0o644, int(path.lstat().st_mtime)
        header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        found.append(Member(below, header, size))
    return found


def size(archived: Sequence[Member]) -> int:
    """How many bytes `stream` gives."""
    return sum(len(one.header) + one.size + one.padding for one in archived) + len(_END)


def stream(folder: Path, archived: Sequence[Member]) -> Iterator[bytes]:
    """The archive in pieces. Raises OSError when a file is not what it was: what was promised cannot be kept."""
    for one in archived:
        yield one.header
        left = one.size
        try:
            descriptor = Storage.open_below(folder, one.path)
        except OutsideStorage as error:
            raise OSError(str(error)) from None
        with os.fdopen(descriptor, "rb") as file:
            while left:
                piece = file.read(min(_PIECE, left))
                if not piece:
                    raise OSError(f"{one.path} has become shorter while it was sent")
                left -= len(piece)
                yield piece
        yield bytes(one.padding)
    yield _END
