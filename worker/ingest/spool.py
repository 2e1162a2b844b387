"""Queue of what waits to be stored, in order: the first part in memory, the rest on the worker's disk, within a limit.

The files have no name (O_TMPFILE, or unlinked at once): no other process can open them, and the kernel frees the space
when this process ends in any way, so that nothing has to be cleaned up. For the same reason nothing is synced: the run
of a dead worker is fenced, and what that worker had not stored must not be stored any more.
"""

import logging
import os
import struct
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

from sqlalchemy import Connection

from app.infra.errors import SetupError
from app.infra.files.disk_space import DiskReserve
from app.infra.private_files import make_private_folder
from app.runs.events.log import NewEvent

log = logging.getLogger(__name__)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_HEADER = struct.Struct("<qBI")


@dataclass(frozen=True)
class RunUpdate:
    """Change of the run with its place among the events: everything put before it is stored before it."""

    apply: Callable[[Connection], None]
    event: NewEvent | None = None
    stored: Callable[[], None] = lambda: None
    """Called once the change is committed."""
    more: tuple[NewEvent, ...] = ()
    """Events after `event`, in the same transaction."""


@dataclass(frozen=True)
class Limits:
    """Limits on what may wait in memory and on disk."""

    memory_events: int = 10_000
    memory_bytes: int = 8 * 2**20
    disk_bytes: int = 2**30
    disk_reserve_bytes: int = 0
    """Bytes of the disk that stay free."""
    steps: int = 10_000
    """Number of changes, which always wait in memory."""
    segment_bytes: int = 32 * 2**20
    """Size of one file, which is removed once it has been read."""


class Spool:
    """Queue of one attempt, in the order of `enqueue_item`; the caller ensures that one thread at a time uses it.

    It accepts everything: a caller checks `is_full` before `enqueue_item`, and waits.
    """

    def __init__(self, name: str, folder: Path, limits: Limits | None = None) -> None:
        """Create an empty queue.

        `folder` is created when it is needed; `name` is for the worker's log.
        """
        self._name = name
        self._folder = folder
        self._limits = limits or Limits()
        self._head: deque[NewEvent | RunUpdate] = deque()
        self._head_bytes = 0
        self._rest: deque[NewEvent | RunUpdate | _OnDisk] = deque()
        """Items after the head. Events among them are in memory because the disk did not accept them."""
        self._segments: deque[_Segment] = deque()
        self._disk_bytes = 0
        self._count = 0
        self._changes_in_rest = 0
        self._refused = 0
        """Number of events that the disk did not accept."""

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """True if callers of `enqueue_item` have to wait, because no more can be queued within the limits."""
        return self._refused > 0 or self._changes_in_rest >= self._limits.steps

    def enqueue_item(self, item: NewEvent | RunUpdate) -> None:
        """Append an item; never fails, because no output may get lost."""
        self._count += 1
        if not self._rest and self._head_has_room:
            self._push_to_head(item)
        elif isinstance(item, RunUpdate):
            self._rest.append(item)
            self._changes_in_rest += 1
        elif self._refused or not self._write_to_disk(item):
            self._rest.append(item)
            self._refused += 1
        elif self._rest and isinstance(self._rest[-1], _OnDisk):
            self._rest[-1].count += 1
        else:
            self._rest.append(_OnDisk(1))

    def first_items(self, most: int) -> list[NewEvent | RunUpdate]:
        """Return the first items, at most `most`; at least one if there is any."""
        while self._rest and self._head_has_room:
            self._push_to_head(self._next_of_rest())
        return list(islice(self._head, most))

    def drop_first(self, count: int) -> None:
        """Remove the first items, which `first_items` has returned."""
        for _ in range(count):
            self._head_bytes -= _item_bytes(self._head.popleft())
        self._count -= count

    def close(self) -> None:
        """Discard everything."""
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        self._head.clear()
        self._rest.clear()
        self._count = self._head_bytes = self._disk_bytes = self._changes_in_rest = self._refused = 0

    @property
    def _head_has_room(self) -> bool:
        return len(self._head) < self._limits.memory_events and self._head_bytes < self._limits.memory_bytes

    def _push_to_head(self, item: NewEvent | RunUpdate) -> None:
        self._head.append(item)
        self._head_bytes += _item_bytes(item)

    def _next_of_rest(self) -> NewEvent | RunUpdate:
        first = self._rest[0]
        if isinstance(first, _OnDisk):
            event = self._read_from_disk()
            first.count -= 1
            if first.count == 0:
                self._rest.popleft()
            return event
        self._rest.popleft()
        if isinstance(first, RunUpdate):
            self._changes_in_rest -= 1
        else:
            self._refused -= 1
        return first

    def _write_to_disk(self, event: NewEvent) -> bool:
        record = _pack_event(event)
        if self._disk_bytes + len(record) > self._limits.disk_bytes:
            self._report_full(f"{self._limits.disk_bytes / 2**20:,.0f} MiB wait on disk, which is the limit")
            return False
        try:
            folder = make_private_folder(self._folder)
            DiskReserve(folder, self._limits.disk_reserve_bytes).ensure_room(len(record))
            if not self._segments or self._segments[-1].written >= self._limits.segment_bytes:
                self._segments.append(_Segment(folder))
            self._segments[-1].append_record(record)
        except (OSError, SetupError) as error:
            self._report_full(f"nothing more can be written to {self._folder} ({error})")
            return False
        self._disk_bytes += len(record)
        return True

    def _report_full(self, why: str) -> None:
        log.warning(
            "%s: %s; training waits until the database has stored the %d events before", self._name, why, self._count
        )

    def _read_from_disk(self) -> NewEvent:
        segment = self._segments[0]
        event, size = segment.next_event()
        self._disk_bytes -= size
        if segment.is_read_through and (len(self._segments) > 1 or self._disk_bytes == 0):
            self._segments.popleft().close()
        return event


class _OnDisk:
    """Number of consecutive events on disk."""

    def __init__(self, count: int) -> None:
        self.count = count


class _Segment:
    """File without a name, written at its end and read from its beginning."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed when read through
        self.written = 0
        self._read = 0

    @property
    def is_read_through(self) -> bool:
        return self._read == self.written

    def append_record(self, record: bytes) -> None:
        # What a failed write leaves after the end is overwritten by the next one.
        done = 0
        while done < len(record):
            done += os.pwrite(self._file.fileno(), record[done:], self.written + done)
        self.written += done

    def next_event(self) -> tuple[NewEvent, int]:
        """Return the next event and the size of its record in bytes."""
        micros, type_size, data_size = _HEADER.unpack(self._read_bytes(_HEADER.size, 0))
        body = self._read_bytes(type_size + data_size, _HEADER.size)
        size = _HEADER.size + len(body)
        self._read += size
        kind, data = (part.decode("utf-8", "surrogatepass") for part in (body[:type_size], body[type_size:]))
        return NewEvent(kind, _EPOCH + micros * _MICROSECOND, data), size

    def close(self) -> None:
        self._file.close()

    def _read_bytes(self, size: int, offset: int) -> bytes:
        content = b""
        while len(content) < size:
            piece = os.pread(self._file.fileno(), size - len(content), self._read + offset + len(content))
            if not piece:
                raise OSError(f"a spool file ends {size - len(content)} bytes early")
            content += piece
        return content


def _pack_event(event: NewEvent) -> bytes:
    kind, data = (text.encode("utf-8", "surrogatepass") for text in (event.type, event.data))
    return _HEADER.pack((event.ts - _EPOCH) // _MICROSECOND, len(kind), len(data)) + kind + data


def _item_bytes(item: NewEvent | RunUpdate) -> int:
    events = (item.event, *item.more) if isinstance(item, RunUpdate) else (item,)
    # A payload that is kept along with its text takes several times as much memory as the text.
    return sum(len(event.data) * (1 if event.measured is None else 6) for event in events if event is not None)
