"""Tar archive of a folder, generated while it is sent: nothing is written to disk, and little is kept in memory."""

import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from starlette.responses import StreamingResponse

from app.api.errors import ResponseCut
from app.infra.files.object_store import StoreUnavailable
from app.infra.storage import Storage
from app.runs.state.artifacts.folders import FileFolder

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


def list_members(folder: FileFolder, name: str) -> list[Member]:
    """List all files of `folder`, sorted by path, archived below `name`; links are skipped."""
    members = []
    for file in folder.list_files()[0]:
        info = tarfile.TarInfo(f"{name}/{file.path}")
        info.size, info.mode, info.mtime = file.bytes, 0o644, file.modified
        header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        members.append(Member(file.path, header, file.bytes))
    return members


def archive_size(archived: Sequence[Member]) -> int:
    """Return the number of bytes that `stream_archive` yields."""
    return sum(len(one.header) + one.size + one.padding for one in archived) + len(_END)


def stream_archive(folder: FileFolder, archived: Sequence[Member]) -> Iterator[bytes]:
    """Yield the archive in pieces; raise OSError if a file changed, because the announced size no longer holds."""
    for member in archived:
        yield member.header
        left = member.size
        for piece in folder.read_chunks(member.path, member.size) if left else ():
            part = piece[:left]
            left -= len(part)
            yield part
            if not left:
                break
        if left:
            raise OSError(f"{member.path} was truncated while it was sent")
        yield bytes(member.padding)
    yield _END


async def tar_response(storage: Storage, folder: FileFolder, name: str) -> StreamingResponse:
    """Return a response that sends all files of `folder`, a folder of the storage, as `name`.tar."""
    archived = await storage.in_thread(list_members, folder, name)
    await storage.in_thread(folder.compare_small, [(member.path, member.size) for member in archived])
    headers = {
        "Content-Length": str(archive_size(archived)),
        "Content-Disposition": f'attachment; filename="{name}.tar"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "private, no-store",
    }
    content = read_in_threads(storage, stream_archive(folder, archived), f"the archive of {name}")
    return StreamingResponse(content, media_type="application/x-tar", headers=headers)


async def read_in_threads(storage: Storage, pieces: Iterator[bytes], what: str) -> AsyncIterator[bytes]:
    """Yield `pieces`, which are read from files of the storage, for a response.

    Raises:
        ResponseCut: A file cannot be read, or is not what was stored; `what` is being sent.
    """
    try:
        while (piece := await storage.in_thread(next, pieces, None)) is not None:
            if piece:
                yield piece
    except (OSError, StoreUnavailable) as error:
        raise ResponseCut(
            f"{what} from {storage.name}: {error}; download it again, and restore the storage if that fails too"
        ) from error
