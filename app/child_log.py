"""The log files of child processes: kept small, and their important lines read along."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

_IMPORTANT = re.compile(r'\b(ERROR|CRITICAL|FATAL|PANIC)\b|"level": "(error|critical)"')
# What PostgreSQL tells clients that come too early or stay too long: known to whoever restarts it.
_EXPECTED = re.compile(r"the database system is|unexpected postmaster exit|due to administrator command")
_LARGEST_BYTES = 10 * 1024**2
_LINES_A_LOOK = 5


class ChildLog:
    """One file that a child appends to; its predecessor is kept beside it as `<name>.log.1`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._read = 0
        if path.exists() and path.stat().st_size:
            path.replace(path.with_name(path.name + ".1"))

    def important_lines(self) -> Iterator[str]:
        """New lines that speak of an error, a handful at a time: the file has them all."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return
        if size > self._read:
            with self.path.open("rb") as file:
                file.seek(self._read)
                text = file.read(min(size - self._read, 1024**2))
            whole = text.rfind(b"\n") + 1 or (len(text) if len(text) >= 1024**2 else 0)
            self._read += whole
            lines = text[:whole].decode(errors="replace").splitlines()
            found = [line for line in lines if _IMPORTANT.search(line) and not _EXPECTED.search(line)]
            yield from (_for_people(line)[:400] for line in found[:_LINES_A_LOOK])
        if size > _LARGEST_BYTES and self._read == size:
            # Cut in place: the child writes with O_APPEND and goes on at the new end.
            shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
            with self.path.open("r+b") as file:
                file.truncate(0)
            self._read = 0


def _for_people(line: str) -> str:
    """A line as it is; of a record in JSON, what it says."""
    try:
        record = json.loads(line)
        return f"{record['level'].upper()} {record['logger']}: {record['event']}"
    except (ValueError, TypeError, LookupError, AttributeError):
        return line
