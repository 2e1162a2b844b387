"""Tar archive of a folder, generated while it is sent: nothing is written to disk, and little is kept in memory."""

import asyncio
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.responses import StreamingResponse

from app.infra.untrusted_folder import OutsideStorage, open_below
from app.runs.artifacts.service import files

_PIECE = 1024 * 1024
_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Member:
    """File of the archive with its tar header, which fixes its size."""

    path: str
    """Path below the folder."""
    header: bytes
    size: int

    @property
    def padding(self) -> int:
        """Number of bytes that pad the last block."""
        return -self.size % tarfile.BLOCKSIZE


def members(folder: Path, name: str) -> list[Member]:
    """List all files below `folder`, sorted by path, archived below `name`; links are skipped."""
    found = []
    for path, status in files(folder)[0]:
        info = tarfile.TarInfo(f"{name}/{path}")
        info.size, info.mode, info.mtime = status.st_size, 0o644, int(status.st_mtime)
        header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        found.append(Member(path, header, status.st_size))
    return found


def size(archived: Sequence[Member]) -> int:
    """Return the number of bytes that `stream` yields."""
    return sum(len(one.header) + one.size + one.padding for one in archived) + len(_END)


def stream(folder: Path, archived: Sequence[Member]) -> Iterator[bytes]:
    """Yield the archive in pieces; raise OSError if a file changed, because the announced size no longer holds."""
    for one in archived:
        yield one.header
        left = one.size
        try:
            descriptor = open_below(folder, one.path)
        except OutsideStorage as error:
            raise OSError(str(error)) from None
        with os.fdopen(descriptor, "rb") as file:
            while left:
                piece = file.read(min(_PIECE, left))
                if not piece:
                    raise OSError(f"{one.path} was truncated while it was sent")
                left -= len(piece)
                yield piece
        yield bytes(one.padding)
    yield _END


async def tar_response(folder: Path, name: str) -> StreamingResponse:
    """Return a response that sends all files below `folder` as `name`.tar."""
    archived = await asyncio.to_thread(members, folder, name)
    headers = {
        "Content-Length": str(size(archived)),
        "Content-Disposition": f'attachment; filename="{name}.tar"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "private, no-store",
    }
    return StreamingResponse(stream(folder, archived), media_type="application/x-tar", headers=headers)
