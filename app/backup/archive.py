"""Archive of `anneal export`: an uncompressed tar file that names no path and is read without trust in it.

```
rows/<table>.jsonl   one JSON object per row
files/00000000 …     contents of files of the storage
files.jsonl          one line per file, with its path, in the same order
anneal.json          written last
```
"""

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.backup.layout import FileEntry, inventory_line
from app.infra.errors import SetupError
from app.infra.files.untrusted_folder import OutsideStorage, refuse_outside

MANIFEST = "anneal.json"
INVENTORY = "files.jsonl"
_BLOCK = tarfile.BLOCKSIZE
_PIECE_BYTES = 1 << 20
_MAX_MEMBERS = 1_000_000
_MAX_MANIFEST_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 26
_NAME = re.compile(r"anneal\.json|files\.jsonl|rows/[a-z_]+\.jsonl|files/[0-9]{8}")

Write = Callable[[bytes], None]


class TableRows(BaseModel):
    """Rows of a table; `columns` are those of the version that wrote them."""

    columns: list[str]
    rows: int = Field(ge=0)
    sha256: str


class ArchiveManifest(BaseModel):
    """Content of `anneal.json`."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    created_at: datetime
    version: str
    """Version of Anneal that made the archive."""
    revision: str
    """Revision of the database's schema."""
    tables: dict[str, TableRows]
    inventory_sha256: str
    """SHA-256 of `files.jsonl`, which has those of all files."""


class ArchiveWriter:
    """Writes an archive to a new file, which has another name until it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._entries: list[FileEntry] = []
        self._tables: dict[str, TableRows] = {}

    @contextmanager
    def open_file(self) -> Iterator["ArchiveWriter"]:
        """Open the file; remove what was written after an error.

        Raises:
            SetupError: It exists, or cannot be written.
        """
        if self._path.exists():
            raise SetupError(f"{self._path} exists: name a new file.")
        try:
            self._partial.unlink(missing_ok=True)
            # In a folder of all users, another user may have placed a file or a link there.
            descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise SetupError(
                f"{self._path} cannot be written ({error.strerror}): name a file in another folder."
            ) from None
        try:
            with os.fdopen(descriptor, "w+b") as self._file:
                yield self
        except OSError as error:
            raise SetupError(f"{self._path} cannot be written ({error.strerror}): nothing was exported.") from None
        finally:
            self._partial.unlink(missing_ok=True)

    def add_rows(self, table: str, columns: list[str], lines: Iterator[str]) -> int:
        """Add the rows of a table and return their number."""
        digest, rows = hashlib.sha256(), 0
        with self._write_member(f"rows/{table}.jsonl") as write:
            for line in lines:
                encoded = line.encode() + b"\n"
                digest.update(encoded)
                write(encoded)
                rows += 1
        self._tables[table] = TableRows(columns=columns, rows=rows, sha256=digest.hexdigest())
        return rows

    def add_file(self, entry: FileEntry, pieces: Iterator[bytes]) -> None:
        """Add a file; size and SHA-256 in `entry` are replaced by those of its content."""
        digest, size = hashlib.sha256(), 0
        with self._write_member(f"files/{len(self._entries):08}") as write:
            for piece in pieces:
                digest.update(piece)
                write(piece)
                size += len(piece)
        facts = {"bytes": size, "sha256": digest.hexdigest()}
        self._entries.append(FileEntry(**{**asdict(entry), **facts}))

    @property
    def entries(self) -> list[FileEntry]:
        """Files added so far."""
        return self._entries

    def finish_archive(self, created_at: datetime, version: str, revision: str) -> None:
        """Complete the archive and give it its name."""
        inventory = "".join(map(inventory_line, self._entries)).encode()
        manifest = ArchiveManifest(
            created_at=created_at,
            version=version,
            revision=revision,
            tables=self._tables,
            inventory_sha256=hashlib.sha256(inventory).hexdigest(),
        )
        for name, content in ((INVENTORY, inventory), (MANIFEST, manifest.model_dump_json(indent=1).encode())):
            with self._write_member(name) as write:
                write(content)
        self._file.write(bytes(2 * _BLOCK))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._partial.rename(self._path)

    @contextmanager
    def _write_member(self, name: str) -> Iterator[Write]:
        """Write a member, whose size is known at its end; after an error it is not in the archive."""
        start = self._file.tell()
        self._file.write(bytes(_BLOCK))
        size = 0

        def write_piece(piece: bytes) -> None:
            nonlocal size
            self._file.write(piece)
            size += len(piece)

        try:
            yield write_piece
        except BaseException:
            self._file.seek(start)
            self._file.truncate()
            raise
        self._file.write(bytes(-size % _BLOCK))
        end = self._file.tell()
        header = tarfile.TarInfo(name)
        header.size = size
        self._file.seek(start)
        self._file.write(header.tobuf(tarfile.GNU_FORMAT))
        self._file.seek(end)


@dataclass(frozen=True)
class _Member:
    start: int
    bytes: int


class ArchiveReader:
    """Reads an archive from anyone: every size is bounded by that of the file, and no name is used as a path."""

    def __init__(self, path: Path) -> None:
        """Read the list of members and the manifest.

        Raises:
            SetupError: It is not an archive of this program, is damaged, or was made by a later version of the format.
        """
        self._path = path
        try:
            self._file = path.open("rb")
            self.bytes = os.fstat(self._file.fileno()).st_size
            self._members = dict(self._read_members())
        except OSError as error:
            raise SetupError(f"{path} cannot be read ({error.strerror}): name a file of `anneal export`.") from None
        content = b"".join(self._read_pieces(MANIFEST, _MAX_MANIFEST_BYTES))
        try:
            self.manifest = ArchiveManifest.model_validate_json(content)
        except ValidationError as error:
            if any(item["loc"] == ("format",) for item in error.errors()):
                raise SetupError(
                    f"{path} was made by a later version of Anneal: import it with that version."
                ) from None
            raise self.damaged_error("its description is not valid") from None

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows of all tables."""
        return sum(member.bytes for name, member in self._members.items() if name.startswith("rows/"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def damaged_error(self, reason: str) -> SetupError:
        """Return the error that nothing is imported from this file."""
        return SetupError(f"{self._path} is damaged or not an archive of `anneal export` ({reason}): export again.")

    def read_rows(self, table: str) -> Iterator[bytes]:
        """Yield the lines of a table."""
        described = self.manifest.tables[table]
        count = 0
        for line in self._read_lines(f"rows/{table}.jsonl", described.sha256):
            count += 1
            yield line
        if count != described.rows:
            raise self.damaged_error(f"rows of {table} are missing")

    def read_files(self) -> Iterator[tuple[FileEntry, Iterator[bytes]]]:
        """Yield each file and its content, which is verified as it is read; paths lead nowhere out of the storage."""
        for number, line in enumerate(self._read_lines(INVENTORY, self.manifest.inventory_sha256)):
            try:
                entry = FileEntry(**json.loads(line))
                numbers = (entry.bytes, entry.mtime_ns, entry.mode)
                if "\0" in entry.path or not all(isinstance(number, int) and abs(number) < 2**63 for number in numbers):
                    raise ValueError(line)
                refuse_outside(entry.path)
            except (ValueError, TypeError, OutsideStorage, AttributeError, RecursionError):
                raise self.damaged_error("its list of files is not valid") from None
            yield entry, self._verified_pieces(entry, f"files/{number:08}")

    def _verified_pieces(self, entry: FileEntry, name: str) -> Iterator[bytes]:
        digest = hashlib.sha256()
        if self._find_member(name).bytes != entry.bytes:
            raise self.damaged_error(f"{entry.path!r} has another size")
        for piece in self._read_pieces(name):
            digest.update(piece)
            yield piece
        if digest.hexdigest() != entry.sha256:
            raise self.damaged_error(f"{entry.path!r} has other contents")

    def _read_lines(self, name: str, sha256: str) -> Iterator[bytes]:
        digest, rest = hashlib.sha256(), b""
        for piece in self._read_pieces(name):
            digest.update(piece)
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                raise self.damaged_error(f"a line of {name} is too long")
            yield from lines
        if rest or digest.hexdigest() != sha256:
            raise self.damaged_error(f"{name} has other contents")

    def _read_pieces(self, name: str, most_bytes: int | None = None) -> Iterator[bytes]:
        member = self._find_member(name)
        if most_bytes is not None and member.bytes > most_bytes:
            raise self.damaged_error(f"{name} is too large")
        at, end = member.start, member.start + member.bytes
        while at < end:
            self._file.seek(at)
            piece = self._file.read(min(_PIECE_BYTES, end - at))
            at += len(piece)
            yield piece

    def _find_member(self, name: str) -> _Member:
        member = self._members.get(name)
        if member is None:
            raise self.damaged_error(f"{name} is missing")
        return member

    def _read_members(self) -> Iterator[tuple[str, _Member]]:
        """Yield the members; anything but plain files with the names of an archive is refused.

        `tarfile` itself would read headers of any size into memory, and expand sparse files.
        """
        at, names = 0, set[str]()
        while (header := _read_header(self._file, at)) is not None:
            try:
                info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
            except (tarfile.HeaderError, UnicodeDecodeError):
                raise self.damaged_error("it is not a tar file, or cut off") from None
            start = at + _BLOCK
            is_plain = info.type == tarfile.REGTYPE and _NAME.fullmatch(info.name) is not None
            if not is_plain or info.name in names or info.size < 0 or start + info.size > self.bytes:
                raise self.damaged_error(f"member {info.name[:80]!r} is not expected")
            if len(names) >= _MAX_MEMBERS:
                raise self.damaged_error("it has too many members")
            names.add(info.name)
            yield info.name, _Member(start, info.size)
            at = start + info.size + -info.size % _BLOCK


def _read_header(file: BinaryIO, at: int) -> bytes | None:
    file.seek(at)
    header = file.read(_BLOCK)
    return None if header == bytes(_BLOCK) else header
