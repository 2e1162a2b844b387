"""Tar archive of a folder, generated while it is sent: nothing is written to disk, and little is kept in memory."""

import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from starlette.responses import StreamingResponse

from app.infra.storage import Storage
from app.runs.artifacts.folders import FileFolder

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


def members(folder: FileFolder, name: str) -> list[Member]:
    """List all files of `folder`, sorted by path, archived below `name`; links are skipped."""
    found = []
    for one in folder.files()[0]:
        info = tarfile.TarInfo(f"{name}/{one.path}")
        info.size, info.mode, info.mtime = one.bytes, 0o644, one.modified
        header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        found.append(Member(one.path, header, one.bytes))
    return found


def size(archived: Sequence[Member]) -> int:
    """Return the number of bytes that `stream` yields."""
    return sum(len(one.header) + one.size + one.padding for one in archived) + len(_END)


def stream(folder: FileFolder, archived: Sequence[Member]) -> Iterator[bytes]:
    """Yield the archive in pieces; raise OSError if a file changed, because the announced size no longer holds."""
    for one in archived:
        yield one.header
        left = one.size
        for piece in folder.pieces(one.path, one.size) if left else ():
            part = piece[:left]
            left -= len(part)
            yield part
            if not left:
                break
        if left:
            raise OSError(f"{one.path} was truncated while it was sent")
        yield bytes(one.padding)
    yield _END


async def tar_response(storage: Storage, folder: FileFolder, name: str) -> StreamingResponse:
    """Return a response that sends all files of `folder`, a folder of the storage, as `name`.tar."""
    archived = await storage.in_thread(members, folder, name)
    headers = {
        "Content-Length": str(size(archived)),
        "Content-Disposition": f'attachment; filename="{name}.tar"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "private, no-store",
    }
    pieces = stream(folder, archived)
    content = pieces if storage.objects is None else _fetched(storage, pieces)
    return StreamingResponse(content, media_type="application/x-tar", headers=headers)


async def _fetched(storage: Storage, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await storage.in_thread(next, pieces, None)) is not None:
        yield piece
