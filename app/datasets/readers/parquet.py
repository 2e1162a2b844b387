"""Parquet: spooled to the disk, since its end is read first, then read by a process of its own."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from app.config import Settings
from app.datasets.readers.parquet_process import CANNOT_READ
from app.datasets.rows import Rows
from app.errors import clean

_PROGRAM = "app.datasets.readers.parquet_process"
_PIECE = 256 * 1024
_SILENT_MILLISECONDS = 60_000


class ParquetReader:
    """Writes the bytes into `spool`; behind the end, reads the rows that the process answers, piece by piece."""

    def __init__(self, rows: Rows, most_bytes: int, spool: Path, settings: Settings) -> None:
        self._rows = rows
        self._most_bytes = most_bytes
        self._spool = spool
        self._settings = settings
        self._file: BinaryIO = spool.open("wb", buffering=0)
        self._process: subprocess.Popen[bytes] | None = None
        self._line = bytearray()
        self._number = 0
        self._began = False

    def feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view:  # an unbuffered file may take less than it is given, when the disk fills up for one
            view = view[self._file.write(view) :]

    def end(self) -> None:
        self._file.close()
        if self._spool.stat().st_size == 0:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, str(self._spool), str(self._most_bytes)],
            # Without any credential, and with the allocator that gives memory back.
            env={**self._settings.trainer_environment(), "ARROW_DEFAULT_MEMORY_POOL": "system"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def more(self) -> bool:
        if self._process is None or self._process.stdout is None:
            return False
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        if not poll.poll(_SILENT_MILLISECONDS):
            self._cannot_read("nothing came of it for a minute")
            return False
        piece = os.read(self._process.stdout.fileno(), _PIECE)
        if piece:
            return self._take(piece)
        self._ended(self._process)
        return False

    def close(self) -> None:
        self._file.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            # Its pipes close with the last reference: a thread that still reads must not meet another file instead.
        self._spool.unlink(missing_ok=True)

    def _take(self, piece: bytes) -> bool:
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
        if not self._began:
            self._began = True
            self._rows.begin_table(json.loads(raw))
            return
        self._number += 1
        if len(raw) > self._most_bytes:
            self._too_long()
        else:
            self._rows.take_json(f"row {self._number}", raw)

    def _too_long(self) -> None:
        message = f"a row may have {self._most_bytes:,} bytes as JSON; split it"
        self._rows.refuse(f"row {self._number}", "row_too_long", message)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        _, told = process.communicate()
        if process.returncode == CANNOT_READ:
            self._cannot_read(told.decode(errors="replace").strip())
        elif process.returncode != 0:
            self._cannot_read("the process that read it crashed")

    def _cannot_read(self, why: str) -> None:
        where = f" behind row {self._number}" if self._number else ""
        message = f"the file cannot be read as Parquet{where} ({clean(why, 200)}); write it again and upload that"
        self._rows.refuse("", "unreadable_parquet", message)
