"""Log files of child processes: rotation, and extraction of error lines."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

_IMPORTANT = re.compile(r'\b(ERROR|CRITICAL|FATAL|PANIC)\b|"level": "(error|critical)"')
# PostgreSQL's messages to clients that connect during startup or stay connected during shutdown; they are expected.
_EXPECTED = re.compile(r"the database system is|unexpected postmaster exit|due to administrator command")
_MAX_BYTES = 10 * 1024**2
_MAX_LINES_PER_CALL = 5
_KEPT_FILES = 5


class ChildLog:
    """Log file that a child process appends to; the five before it are `<name>.log.1` (the newest) to `.5`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._offset = 0
        if path.exists() and path.stat().st_size:
            path.replace(self._make_room())

    def _make_room(self) -> Path:
        """Move each earlier file one number up, and return the path of the first."""
        numbered = [self.path.with_name(f"{self.path.name}.{number}") for number in range(1, _KEPT_FILES + 1)]
        for older, newer in zip(reversed(numbered[1:]), reversed(numbered[:-1]), strict=True):
            if newer.exists():
                newer.replace(older)
        return numbered[0]

    def important_lines(self) -> Iterator[str]:
        """Yield new error lines, at most five per call; the file contains all of them."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return
        if size > self._offset:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read(min(size - self._offset, 1024**2))
            whole = text.rfind(b"\n") + 1 or (len(text) if len(text) >= 1024**2 else 0)
            self._offset += whole
            lines = text[:whole].decode(errors="replace").splitlines()
            important = [line for line in lines if _IMPORTANT.search(line) and not _EXPECTED.search(line)]
            yield from (_readable_line(line)[:400] for line in important[:_MAX_LINES_PER_CALL])
        if size > _MAX_BYTES and self._offset == size:
            self._rotate_files()

    def _rotate_files(self) -> None:
        """Keep the content as the first earlier file, unless the disk is full, and start the file again."""
        copy = self._make_room()
        try:
            shutil.copyfile(self.path, copy)
        except OSError:
            copy.unlink(missing_ok=True)
        # Truncate in place: the child writes with O_APPEND and continues at the new end.
        with self.path.open("r+b") as file:
            file.truncate(0)
        self._offset = 0


def _readable_line(line: str) -> str:
    """Return the line unchanged, or level, logger and event if it is a JSON record."""
    try:
        record = json.loads(line)
        return f"{record['level'].upper()} {record['logger']}: {record['event']}"
    except (ValueError, TypeError, LookupError, AttributeError):
        return line
