"""Complete log of an attempt: every line of its output, compressed, in a file beside its other records."""

import errno
import os
import time
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from anneal.contracts.attempt.records import LOG_TEXT_BYTES, log_files
from app.infra.files.disk_space import free_bytes
from worker.ingest.log_lines import LogLine

_LEVEL = 3
"""Of zlib: half the time of the default, for files that are a tenth larger."""
_CHECK_BYTES = 256 * 1024
_CHECK_SECONDS = 1.0
_NEW_FILE = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RETRY_SECONDS = 10.0


class LogFile:
    """Complete log of an attempt, in a folder that belongs to the user that trains.

    A line is in the file when `flush` returns. What cannot be written, because the disk is full or would lose its
    reserve, is counted and reported once, and costs nothing else: the attempt goes on.
    """

    def __init__(
        self, folder: Path, name: str, reserve: int, report: Callable[[str], None], text_bytes: int = LOG_TEXT_BYTES
    ) -> None:
        """Keep `reserve` bytes of the disk free; `report` takes sentences for the run's log."""
        self._folder = folder
        self._older, self._current = log_files(name)
        self._reserve = reserve
        self._report = report
        self._text_bytes = text_bytes
        self._waiting: list[bytes] = []
        self._compressor = _new_compressor()
        self._descriptor: int | None = None
        self._release: Callable[[], object] = lambda: None
        """Closes the descriptor, at the latest when this object is deleted."""
        self._written = 0
        """Bytes of text in the current file."""
        self._unchecked_bytes = _CHECK_BYTES
        self._checked_at = 0.0
        self._failed_at: float | None = None
        """Monotonic time of the last failure; None while lines are written."""
        self._missing = 0
        """Lines that could not be written since the last one that was."""
        self._is_reported = self._is_rotation_reported = self._is_closed = False

    @property
    def is_complete(self) -> bool:
        """True while every line so far is in the file, except those that newer ones have replaced."""
        return not self._is_reported

    def add_line(self, line: LogLine, now: float) -> None:
        """Append a line that was printed at `now`, in seconds since 1970."""
        if not self._is_closed:
            self._waiting.append(_format_line(line, now))

    def flush(self) -> None:
        """Write the lines that were added."""
        if not self._waiting:
            return
        lines, self._waiting = self._waiting, []
        if self._failed_at is not None and time.monotonic() - self._failed_at < _RETRY_SECONDS:
            self._missing += len(lines)
            return
        try:
            self._write_lines(lines)
        except OSError as error:
            self._record_failure(len(lines), error.strerror or str(error))

    def close(self) -> None:
        """Write the end of the file; lines that are added later are ignored."""
        self.flush()
        self._is_closed = True
        if self._descriptor is not None:
            with suppress(OSError):
                self._append_text(self._descriptor, b"", zlib.Z_FINISH)
        self._release()
        self._descriptor = None

    def _write_lines(self, lines: list[bytes]) -> None:
        text = b"".join(lines)
        self._check_disk(len(text))
        if self._missing:
            note = f"{self._missing:,} lines are missing here: they could not be written"
            text = _format_line({"line": note, "stream": "anneal", "level": "warning"}, time.time()) + text
        if self._written and self._written + len(text) > self._text_bytes:
            self._rotate_files()
        if self._descriptor is None:
            self._create_file()
        assert self._descriptor is not None  # noqa: S101
        self._append_text(self._descriptor, text, zlib.Z_SYNC_FLUSH)
        self._written += len(text)
        self._failed_at, self._missing = None, 0

    def _append_text(self, descriptor: int, text: bytes, mode: int) -> None:
        """Write compressed text, completely or not at all: what follows half of it could not be read."""
        before, size = self._compressor.copy(), os.fstat(descriptor).st_size
        try:
            data = memoryview(self._compressor.compress(text) + self._compressor.flush(mode))
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            self._compressor = before
            os.ftruncate(descriptor, size)
            raise

    def _check_disk(self, size: int) -> None:
        """Raise OSError if the disk has no more than its reserve; looks once a second, or more often in a flood."""
        self._unchecked_bytes += size
        now = time.monotonic()
        if self._unchecked_bytes < _CHECK_BYTES and now - self._checked_at < _CHECK_SECONDS:
            return
        free = free_bytes(self._folder)
        if free is not None and free < self._reserve + size:
            why = f"the disk has {free / 2**20:,.0f} MiB free, and {self._reserve / 2**20:,.0f} MiB must stay free"
            raise OSError(errno.ENOSPC, f"{why} (ANNEAL_DISK_RESERVE_BYTES)")
        self._unchecked_bytes, self._checked_at = 0, now

    def _create_file(self) -> None:
        # Relative to the folder, without following links: its owner may put anything there.
        folder = os.open(self._folder, _FOLDER)
        try:
            self._descriptor = os.open(self._current, _NEW_FILE, 0o644, dir_fd=folder)
        finally:
            os.close(folder)
        self._release = weakref.finalize(self, os.close, self._descriptor)

    def _rotate_files(self) -> None:
        if self._descriptor is not None:
            self._append_text(self._descriptor, b"", zlib.Z_FINISH)
        self._release()
        self._descriptor, self._compressor = None, _new_compressor()
        folder = os.open(self._folder, _FOLDER)
        try:
            has_older = self._older in os.listdir(folder)  # noqa: PTH208 - of a descriptor
            os.rename(self._current, self._older, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(folder)
        self._written = 0
        if has_older and not self._is_rotation_reported:
            self._is_rotation_reported = True
            self._report(
                f"the complete log of this attempt has more than {2 * self._text_bytes / 2**20:,.0f} MiB of text: "
                "its oldest lines are removed"
            )

    def _record_failure(self, lines: int, why: str) -> None:
        self._missing += lines
        self._failed_at = time.monotonic()
        self._unchecked_bytes = _CHECK_BYTES
        if not self._is_reported:
            self._is_reported = True
            self._report(f"lines are missing in the complete log of this attempt: {why}")


def _new_compressor() -> "zlib._Compress":
    return zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)


def _format_line(line: LogLine, now: float) -> bytes:
    when = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = f"{when} {line['stream']} {line['level']} "
    return "".join(f"{head}{text}\n" for text in line["line"].split("\n")).encode()
