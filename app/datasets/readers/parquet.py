"""Parquet reader: spools the file to disk, because its footer is read first, and parses it in a separate process."""

import json
from pathlib import Path
from typing import BinaryIO

from app.api.errors import to_printable, too_large
from app.config import Settings
from app.datasets.row_writer import RowWriter
from app.infra.files.disk_space import DiskReserve
from app.infra.process.sandbox import ChildFailed, SandboxProcess

_PROGRAM = "app.datasets.readers.parquet_process"
_SILENT_SECONDS = 60.0
_MAX_SECONDS = 1800.0


class ParquetReader:
    """Writes the bytes to `spool`; after the end of the file, reads rows from the process piece by piece."""

    def __init__(
        self, rows: RowWriter, most_bytes: int, spool: Path, settings: Settings, disk_reserve: DiskReserve
    ) -> None:
        self._rows = rows
        self._most_bytes = most_bytes
        self._spool = spool
        self._settings = settings
        self._disk_reserve = disk_reserve
        self._file: BinaryIO = spool.open("wb", buffering=0)
        self._is_complete = False
        self._child: SandboxProcess | None = None
        self._bytes_read = 0
        self._line = bytearray()
        self._number = 0
        self._has_header = False

    def feed(self, data: bytes) -> None:
        self._disk_reserve.ensure_room(len(data))
        view = memoryview(data)
        while view:  # an unbuffered file may write less than requested, for example when the disk fills up
            view = view[self._file.write(view) :]

    def end_file(self) -> None:
        self._file.close()
        self._is_complete = self._spool.stat().st_size > 0

    def read_more(self) -> bool:
        if not self._is_complete:
            return False
        if self._child is None:
            self._child = self._start_process()
        try:
            piece = self._child.read()
        except ChildFailed as error:
            self._cannot_read(str(error))
            return False
        self._bytes_read += len(piece)
        if self._bytes_read > self._settings.max_upload_bytes:
            raise too_large("A dataset, converted to JSONL,", self._settings.max_upload_bytes)
        return self._take_lines(piece) if piece else False

    def close(self) -> None:
        self._file.close()
        if self._child is not None:
            self._child.close()
        self._spool.unlink(missing_ok=True)

    def _start_process(self) -> SandboxProcess:
        return SandboxProcess(
            _PROGRAM,
            [str(self._spool), str(self._most_bytes), *self._rows.needed],
            self._settings,
            silent=_SILENT_SECONDS,
            most_seconds=_MAX_SECONDS,
            environment={"ARROW_DEFAULT_MEMORY_POOL": "system"},  # releases freed memory to the system
        )

    def _take_lines(self, piece: bytes) -> bool:
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            self._line += piece[start:end]
            self._end_line()
            start = end + 1
        self._line += piece[start:]
        if len(self._line) > self._most_bytes:
            self._number += 1
            self._too_long()
            return False
        return True

    def _end_line(self) -> None:
        raw = bytes(self._line)
        self._line.clear()
        if not self._has_header:
            self._has_header = True
            self._rows.begin_table(json.loads(raw))
            return
        self._number += 1
        if len(raw) > self._most_bytes:
            self._too_long()
        elif raw.startswith(b"!"):
            self._rows.record_error(f"row {self._number}", "not_utf8", raw[1:].decode(errors="replace"))
        else:
            self._rows.take_json(f"row {self._number}", raw)

    def _too_long(self) -> None:
        message = f"a row may have at most {self._most_bytes:,} bytes as JSON; split it"
        self._rows.record_error(f"row {self._number}", "row_too_long", message)

    def _cannot_read(self, why: str) -> None:
        where = f" after row {self._number}" if self._number else ""
        message = (
            f"the file cannot be read as Parquet{where} ({to_printable(why, 200)}); write it again and upload it again"
        )
        self._rows.record_error("", "unreadable_parquet", message)
