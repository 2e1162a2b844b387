"""Complete logs of attempts: every line that the training processes printed, in files that workers write.

The folder belongs to the user that trains, so nothing about the content of a file is certain.
"""

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import BigInteger, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.attempt.records import LOG_TEXT_BYTES, is_log_file, log_files
from anneal.contracts.schemas.logs import CompleteLogLine
from app.api.errors import ApiError
from app.infra.files.object_store import StoreUnavailable
from app.infra.files.untrusted_folder import OutsideStorage
from app.infra.files.verified_reads import CorruptContent
from app.runs.state.artifacts.folders import FileFolder
from app.tables.events import RunEvent

MOST_HITS = 100
_CHUNK_BYTES = 256 * 1024
_LONGEST_LINE = 64 * 1024
MOST_SEARCHED_BYTES = 2 * LOG_TEXT_BYTES + 64 * 2**20
"""Text that a search reads: no less than the log of an attempt that a worker has written."""
_BYTES_BEYOND_TEXT = 2**20
"""Bytes that a file may have beside twice the size of its text; a worker writes fewer than the text has."""
_HEAD_FIELDS = 3
_DATA = RunEvent.__table__.c.data


@dataclass(frozen=True)
class SearchResult:
    """Matches in the complete log of an attempt."""

    matches: int
    lines: list[CompleteLogLine]
    """The newest matches, in order."""
    problem: str | None
    """Why the end of the log was not searched."""
    searched_bytes: int


async def left_out_lines(session: AsyncSession, run_id: str) -> dict[int, int]:
    """Return the number of lines that the stream lacks, by attempt."""
    left_out = _DATA["left_out"].astext
    query = (
        select(RunEvent.attempt, func.sum(left_out.cast(BigInteger)))
        .where(RunEvent.run_id == run_id, RunEvent.type == "log", left_out.is_not(None))
        .group_by(RunEvent.attempt)
        .order_by(RunEvent.attempt)
    )
    return {attempt: int(count) for attempt, count in await session.execute(query)}


def files_of(folder: FileFolder) -> list[tuple[str, int]]:
    """Return the paths of the log's files with their sizes: those of the lead first, of each log the older one first.

    Raises:
        ApiError: 404 if the attempt has no complete log.
    """
    sizes = {file.path: file.bytes for file in folder.list_files()[0] if is_log_file(file.path)}
    if not sizes:
        raise ApiError(
            404,
            "complete_log_missing",
            "This attempt has no complete log: it printed nothing, or its worker could not write the file. "
            "Read the lines of the stream instead: `anneal runs logs`, or GET /v1/runs/{id}/logs.",
        )
    names = sorted(
        {path.removesuffix(".txt.gz").removesuffix(".1") for path in sizes}, key=lambda name: (len(name), name)
    )
    return [(path, sizes[path]) for name in names for path in log_files(name) if path in sizes]


def read_text(folder: FileFolder, files: Sequence[tuple[str, int]]) -> Iterator[bytes]:
    """Yield the text of the files in pieces of at most 256 KiB.

    Raises:
        OSError, StoreUnavailable: A file cannot be read.
    """
    for path, size in files:
        yield from _decompress_gzip(folder.read_chunks(path, size))


def matching_lines(pieces: Iterator[bytes], phrase: str, most_bytes: int) -> Iterator[bytes]:
    """Yield for each piece its lines whose text contains `phrase`, with their line ends; empty if there are none.

    Raises:
        OSError, StoreUnavailable: A file cannot be read, or there are more than `most_bytes` of text.
    """
    needle = phrase.encode(errors="replace")
    for lines in _align_to_lines(_limit_bytes(pieces, most_bytes)):
        is_possible = needle in lines
        yield b"".join(line for line in lines.splitlines(True) if needle in _text_of(line)) if is_possible else b""


def search_log(
    folder: FileFolder,
    phrase: str,
    levels: Sequence[str] | None,
    stream: str | None,
    most_bytes: int,
    most_lines: int,
) -> SearchResult:
    """Find the lines whose text contains `phrase`, filtered by level and stream (None: any).

    Reads at most `most_bytes` of text, and returns at most `most_lines` lines.
    """
    newest: deque[CompleteLogLine] = deque(maxlen=most_lines)
    matches, searched_bytes, problem = 0, 0, None

    def count_bytes(pieces: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal searched_bytes
        for piece in pieces:
            searched_bytes += len(piece)
            yield piece

    try:
        for lines in matching_lines(count_bytes(read_text(folder, files_of(folder))), phrase, most_bytes):
            for line in lines.splitlines():
                hit = _parse_line(line)
                if (levels is None or hit.level in levels) and (stream is None or hit.stream == stream):
                    matches += 1
                    newest.append(hit)
    except CorruptContent as error:
        return SearchResult(0, [], f"the log in the storage is not what was stored: {error}", searched_bytes)
    except (OSError, StoreUnavailable, OutsideStorage) as error:
        problem = f"its end could not be read: {error}"
    return SearchResult(matches, [*newest], problem, searched_bytes)


def _decompress_gzip(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the text of a gzip file, as far as there is one: it grows, and a killed worker has not written its end.

    What a worker does not write would take time without end: a second part, and bytes without text.
    """
    decompressor = zlib.decompressobj(16 + zlib.MAX_WBITS)
    file_bytes = text_bytes = 0
    for piece in pieces:
        file_bytes += len(piece)
        data = piece
        while data:
            try:
                text = decompressor.decompress(data, _CHUNK_BYTES)
            except zlib.error as error:
                raise OSError(f"the file is damaged ({error})") from None
            text_bytes += len(text)
            if text:
                yield text
            data = decompressor.unconsumed_tail
        if decompressor.unused_data:
            raise OSError("the file is damaged (its text has ended before)")
        if file_bytes > 2 * text_bytes + _BYTES_BEYOND_TEXT:
            raise OSError("the file is damaged (most of it is no text)")


def _limit_bytes(pieces: Iterator[bytes], most_bytes: int) -> Iterator[bytes]:
    searched = 0
    for piece in pieces:
        searched += len(piece)
        if searched > most_bytes:
            raise OSError(f"it has more than {most_bytes / 2**20:,.0f} MiB of text; download it")
        yield piece


def _align_to_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same bytes, so that each piece ends with a line end, as long as no line is longer than any of ours."""
    rest = b""
    for piece in pieces:
        end = piece.rfind(b"\n") + 1
        if end:
            yield rest + piece[:end]
            rest = piece[end:]
        else:
            rest += piece
        if len(rest) > _LONGEST_LINE:
            yield rest + b"\n"
            rest = b""
    if rest:
        yield rest + b"\n"


def _text_of(line: bytes) -> bytes:
    return line.split(b" ", _HEAD_FIELDS)[-1]


def _parse_line(line: bytes) -> CompleteLogLine:
    fields = line.decode(errors="replace").split(" ", _HEAD_FIELDS)
    try:
        when, stream, level, text = fields
        return CompleteLogLine(ts=datetime.fromisoformat(when).astimezone(UTC), line=text, stream=stream, level=level)
    except (ValueError, OverflowError):  # the file was written by something else
        return CompleteLogLine(ts=datetime.fromtimestamp(0, UTC), line=" ".join(fields), stream="stdout", level="info")
