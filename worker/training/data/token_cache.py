"""Cache of tokenized data for later runs: memory-mapped Arrow tables, addressed by their inputs.

An entry is one file: an Arrow stream, a JSON object with its inputs and the facts about the table, and a digest of
both. Its name is a digest of the inputs, so two runs with the same data, tokenizer and settings find the same entry.
It gets its name by a rename, so it is complete or does not exist, and two runs that make it at the same time replace
one good file with another. Every entry is verified when it is read, and made again if it is corrupt. An entry that is
removed while a run reads it stays readable for that run.

A user with write access can put wrong tokens into an entry with the right digest. So the folder belongs to one user,
and files of other users are not read. The digest detects corruption, not tampering.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import xxhash

from anneal.contracts.attempt.job import JobSpec
from app.infra.files.disk_space import DiskReserve
from worker.wire.heartbeat import HeartbeatCallback, no_heartbeat

_LAYOUT = 1
"""Version of the file layout."""
_CHUNK_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")
"""Length of the JSON in bytes, stored after it."""
_DIGEST_BYTES = 16
"""Size of the XXH3 digest at the end of the file, which covers everything before it."""

Write = Callable[[pa.RecordBatch], None]
Build = Callable[[Write], dict[str, Any]]
"""Function that makes the table: writes its batches in order, and returns JSON-serializable facts about it."""


class _CorruptEntry(Exception):
    """A file is not a valid entry."""


class _WriteFailed(Exception):
    """The folder cannot be written to."""


@dataclass(frozen=True)
class Entry:
    """A table and the facts about it."""

    table: pa.Table
    """Its buffers are in the mapped file, if there is one."""
    facts: dict[str, Any]
    name: str
    """Digest of the inputs: the same for the same content."""
    from_cache: bool
    """True if an earlier run made it."""


class TokenCache:
    """Cache entries in a folder; with `folder` None nothing is kept, and tables stay in memory."""

    def __init__(
        self,
        folder: Path | None = None,
        limit_bytes: int = 0,
        *,
        disk_reserve_bytes: int = 0,
        warn: Callable[[str], None] = lambda _: None,
        alive: HeartbeatCallback = no_heartbeat,
        wait_for_maker: Callable[[], None] | None = None,
    ) -> None:
        """Open the cache, which leaves `disk_reserve_bytes` of the disk free.

        `warn` is called with errors of the folder, `alive` during long reads (it may raise). `wait_for_maker` waits
        until another process of the run has made the entries that are missing; None if this one is to make them.
        """
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._disk_reserve_bytes = disk_reserve_bytes
        self._warn = warn
        self._alive = alive
        self._wait_for_maker = wait_for_maker

    @classmethod
    def of_job(
        cls,
        job: JobSpec,
        *,
        warn: Callable[[str], None],
        alive: HeartbeatCallback,
        wait_for_maker: Callable[[], None] | None,
    ) -> "TokenCache":
        """Open the cache that a job names; without one, nothing is kept."""
        named = job.token_cache
        if named is None:
            return cls()
        return cls(
            named.folder,
            named.limit_bytes,
            disk_reserve_bytes=job.disk_reserve_bytes,
            warn=warn,
            alive=alive,
            wait_for_maker=wait_for_maker,
        )

    def get_or_build(self, parts: Mapping[str, Any] | None, schema: pa.Schema, build: Build) -> Entry:
        """Return the entry of an earlier run with the same `parts`, or make it with `build`.

        Any exception of `build` is raised unchanged, and nothing is kept then.

        Args:
            parts: everything that the result depends on, JSON-serializable, with a version of the code that builds;
                None if that is unknown, so that nothing is kept.
            schema: columns of the table.
            build: called once; called again to make the table in memory if the folder cannot be written to.
        """
        if self._folder is None or parts is None:
            return _in_memory(secrets.token_hex(), schema, build)
        made_from = json.dumps({"layout": _LAYOUT, "columns": schema.names, "parts": parts}, sort_keys=True)
        name = hashlib.sha256(made_from.encode()).hexdigest()
        path = self._folder / f"{name}.tokens"
        stored = self._read_stored(path, made_from)
        if stored is None and self._wait_for_maker is not None:
            self._wait_for_maker()
            stored = self._read_stored(path, made_from)
        if stored is not None:
            return Entry(*stored, name, from_cache=True)
        try:
            self._remove_drafts(self._folder)
            built = self._build_entry(path, made_from, schema, build)
            self._evict_entries(self._folder)
        except _WriteFailed as failed:
            self._warn(
                f"The tokens cannot be cached for later runs: {failed.__cause__}. This run keeps them in memory."
            )
            return _in_memory(name, schema, build)
        return Entry(*built, name, from_cache=False)

    def _read_stored(self, path: Path, made_from: str) -> tuple[pa.Table, dict[str, Any]] | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"The tokens of an earlier run cannot be read ({error.strerror}) and are made again.")
            return None
        try:
            stored = _read_entry(descriptor, made_from, self._alive)
        except (_CorruptEntry, OSError) as error:
            self._warn(f"The tokens of an earlier run are corrupt ({error}) and are made again.")
            return None
        else:
            with suppress(OSError):  # sets the time of last use, for `_evict`; fails for a read-only user
                os.utime(descriptor)
            return stored
        finally:
            os.close(descriptor)

    def _build_entry(
        self, path: Path, made_from: str, schema: pa.Schema, build: Build
    ) -> tuple[pa.Table, dict[str, Any]]:
        draft = path.with_name(f"{secrets.token_hex(8)}.draft")
        reserve = DiskReserve(path.parent, self._disk_reserve_bytes)
        with _write_errors():
            reserve.ensure_room(0)
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with _write_errors():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # marks the draft as in use for `_sweep`
                stream = pa.OSFile(str(draft), "wb")
                writer = pa.ipc.new_stream(stream, schema)

            def write_batch(batch: pa.RecordBatch) -> None:
                with _write_errors():
                    reserve.ensure_room(batch.nbytes)
                    writer.write_batch(batch)

            facts = build(write_batch)
            with _write_errors():
                writer.close()
                stream.close()
                _append_digest(descriptor, json.dumps({"made_from": made_from, "facts": facts}).encode(), self._alive)
                os.fsync(descriptor)
                built = _read_entry(descriptor, made_from, self._alive)
                # The rename need not survive a power failure: without it, the tokens are made again.
                draft.rename(path)
            return built
        finally:
            with suppress(OSError):
                draft.unlink()
            os.close(descriptor)

    def _remove_drafts(self, folder: Path) -> None:
        """Remove the drafts of killed runs, whose locks the kernel has released."""
        for draft in folder.glob("*.draft"):
            with suppress(OSError):
                descriptor = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    draft.unlink()
                finally:
                    os.close(descriptor)

    def _evict_entries(self, folder: Path) -> None:
        """Remove the least recently used entries until the size limit is met."""
        entries = []
        for path in folder.glob("*.tokens"):
            with suppress(OSError):
                status = path.lstat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        left = self._limit_bytes
        for _, size, path in sorted(entries, reverse=True):
            left -= size
            if left < 0:
                with suppress(OSError):
                    path.unlink()


@contextmanager
def _write_errors() -> Iterator[None]:
    """Raise `_WriteFailed` for disk errors while an entry is written, as opposed to errors of `build`."""
    try:
        yield
    except (OSError, _CorruptEntry) as error:
        raise _WriteFailed from error


def _in_memory(name: str, schema: pa.Schema, build: Build) -> Entry:
    batches: list[pa.RecordBatch] = []
    facts = build(batches.append)
    return Entry(pa.Table.from_batches(batches, schema), facts, name, from_cache=False)


def _append_digest(descriptor: int, metadata: bytes, alive: HeartbeatCallback) -> None:
    """Append the JSON `metadata` about a table, and the digest, to its file."""
    size = os.fstat(descriptor).st_size
    end = metadata + _LENGTH.pack(len(metadata))
    digest = _digest_file(descriptor, size, alive)
    digest.update(end)
    end += digest.digest()
    if os.pwrite(descriptor, end, size) < len(end):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read_entry(descriptor: int, made_from: str, alive: HeartbeatCallback) -> tuple[pa.Table, dict[str, Any]]:
    """Table and facts of an open entry, the table still in its file.

    Raises:
        _CorruptEntry: it is not an entry, not owned by this user, not complete, or made from other inputs.
        OSError: it cannot be read.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise _CorruptEntry("not a file of this user")
    metadata_end = status.st_size - _DIGEST_BYTES - _LENGTH.size
    if metadata_end < 0:
        raise _CorruptEntry("truncated")
    # Read and not only mapped: an I/O error raises here, but would kill the process (SIGBUS) in a mapping.
    digest = _digest_file(descriptor, status.st_size - _DIGEST_BYTES, alive).digest()
    mapped = mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
    if mapped[-_DIGEST_BYTES:] != digest:
        raise _CorruptEntry("its digest does not match")
    try:
        (length,) = _LENGTH.unpack_from(mapped, metadata_end)
        metadata = json.loads(mapped[metadata_end - length : metadata_end])
        if metadata["made_from"] != made_from:
            raise _CorruptEntry("made from other data")
        table = pa.ipc.open_stream(pa.py_buffer(mapped).slice(0, metadata_end - length)).read_all()
        return table, dict(metadata["facts"])
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise _CorruptEntry(str(error)) from error


def _digest_file(descriptor: int, size: int, alive: HeartbeatCallback) -> Any:
    """Compute the XXH3 hash of the first `size` bytes of a file; the result accepts more updates.

    Raises:
        _CorruptEntry: the file is shorter.
    """
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    place = 0
    while place < size:
        got = os.preadv(descriptor, [chunk[: size - place]], place)
        if got == 0:
            raise _CorruptEntry("truncated")
        digest.update(chunk[:got])
        place += got
        alive()
    return digest
