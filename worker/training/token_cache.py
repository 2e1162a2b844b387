"""Prepared data, kept for later runs: Arrow tables mapped into memory, found by what they were made from.

An entry is one file: an Arrow stream, a JSON object with what it was made from and what was found out on the way, and
a digest of all that. Its name is a digest of what it was made from, so two runs with the same data, tokenizer and
settings find the same entry. It comes to its name by a rename, so it is whole or not there, and two runs that make it
at once replace one good file by another. What is read is checked; what does not hold is made anew. An entry that is
removed while a run reads it stays readable for that run.

Who may write here can put wrong tokens into an entry, with the right digest: so the folder belongs to one user, and a
file of anybody else's is not read. The digest tells damage, not malice.
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

from worker.training.pulse import Alive, nobody

_LAYOUT = 1
"""Of the file."""
_PIECE = 1 << 20
_LENGTH = struct.Struct("<Q")
"""Of the JSON in bytes, behind it."""
_DIGEST_BYTES = 16
"""An XXH3 digest of all before it ends the file."""

Write = Callable[[pa.RecordBatch], None]
Build = Callable[[Write], dict[str, Any]]
"""Makes the table: writes its batches one after the other, and returns facts about it, as JSON can hold them."""


class _Damaged(Exception):
    """A file is not what an entry should be."""


class _Refused(Exception):
    """The folder cannot be written to."""


@dataclass(frozen=True)
class Entry:
    """A table and what is known about it."""

    table: pa.Table
    """Its buffers lie in the mapped file, where it has one."""
    facts: dict[str, Any]
    name: str
    """The same for the same content."""
    was_there: bool
    """It was made by an earlier run."""


class TokenCache:
    """The entries in a folder; `folder` None keeps none, and tables live in memory."""

    def __init__(
        self,
        folder: Path | None = None,
        limit_bytes: int = 0,
        *,
        warn: Callable[[str], None] = lambda _: None,
        alive: Alive = nobody,
    ) -> None:
        """`warn` is told what went wrong with the folder; `alive` is called while much is read, and may raise."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._warn = warn
        self._alive = alive

    @classmethod
    def of_job(cls, job: Mapping[str, Any], *, warn: Callable[[str], None], alive: Alive) -> "TokenCache":
        """The cache that a job names; a job that names none has none."""
        named = job.get("token_cache")
        if named is None:
            return cls()
        return cls(Path(named["folder"]), named["limit_bytes"], warn=warn, alive=alive)

    def entry(self, parts: Mapping[str, Any] | None, schema: pa.Schema, build: Build) -> Entry:
        """What `build` makes, or made in an earlier run from the same `parts`.

        Args:
            parts: everything that the result depends on, as JSON can hold it, with a version of the code that builds;
                None when that is not known, so that nothing is kept.
            schema: columns of the table.
            build: called once; once more when the folder takes no more, to make the table in memory then.

        Raises:
            Whatever `build` raises; nothing is kept then.
        """
        if self._folder is None or parts is None:
            return _in_memory(secrets.token_hex(), schema, build)
        made_from = json.dumps({"layout": _LAYOUT, "columns": schema.names, "parts": parts}, sort_keys=True)
        name = hashlib.sha256(made_from.encode()).hexdigest()
        path = self._folder / f"{name}.tokens"
        found = self._found(path, made_from)
        if found is not None:
            return Entry(*found, name, was_there=True)
        try:
            self._sweep(self._folder)
            made = self._make(path, made_from, schema, build)
            self._shrink(self._folder)
        except _Refused as refused:
            self._warn(f"The tokens cannot be kept for later runs: {refused.__cause__}. This run goes on from memory.")
            return _in_memory(name, schema, build)
        return Entry(*made, name, was_there=False)

    def _found(self, path: Path, made_from: str) -> tuple[pa.Table, dict[str, Any]] | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"Tokens of an earlier run cannot be read ({error.strerror}) and are made anew.")
            return None
        try:
            found = _read(descriptor, made_from, self._alive)
        except (_Damaged, OSError) as error:
            self._warn(f"Tokens of an earlier run are damaged ({error}) and are made anew.")
            return None
        else:
            with suppress(OSError):  # the time of its last use, for `_shrink`; not for who may only read
                os.utime(descriptor)
            return found
        finally:
            os.close(descriptor)

    def _make(self, path: Path, made_from: str, schema: pa.Schema, build: Build) -> tuple[pa.Table, dict[str, Any]]:
        draft = path.with_name(f"{secrets.token_hex(8)}.draft")
        with _refusals():
            descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with _refusals():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # says to `_sweep` that somebody writes
                stream = pa.OSFile(str(draft), "wb")
                writer = pa.ipc.new_stream(stream, schema)

            def write(batch: pa.RecordBatch) -> None:
                with _refusals():
                    writer.write_batch(batch)

            facts = build(write)
            with _refusals():
                writer.close()
                stream.close()
                _seal(descriptor, json.dumps({"made_from": made_from, "facts": facts}).encode(), self._alive)
                os.fsync(descriptor)
                made = _read(descriptor, made_from, self._alive)
                # The name need not survive a power cut: without it, the tokens are made once more.
                draft.rename(path)
            return made
        finally:
            with suppress(OSError):
                draft.unlink()
            os.close(descriptor)

    def _sweep(self, folder: Path) -> None:
        """Remove what killed runs were writing: the kernel gave their locks back."""
        for draft in folder.glob("*.draft"):
            with suppress(OSError):
                descriptor = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    draft.unlink()
                finally:
                    os.close(descriptor)

    def _shrink(self, folder: Path) -> None:
        """Remove what was not used for longest, down to the limit."""
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
def _refusals() -> Iterator[None]:
    """What the disk refuses while an entry is written, told from what goes wrong while it is built."""
    try:
        yield
    except (OSError, _Damaged) as error:
        raise _Refused from error


def _in_memory(name: str, schema: pa.Schema, build: Build) -> Entry:
    batches: list[pa.RecordBatch] = []
    facts = build(batches.append)
    return Entry(pa.Table.from_batches(batches, schema), facts, name, was_there=False)


def _seal(descriptor: int, told: bytes, alive: Alive) -> None:
    """Write what is `told` of a table, and the digest, behind it."""
    size = os.fstat(descriptor).st_size
    end = told + _LENGTH.pack(len(told))
    digest = _digest(descriptor, size, alive)
    digest.update(end)
    end += digest.digest()
    if os.pwrite(descriptor, end, size) < len(end):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read(descriptor: int, made_from: str, alive: Alive) -> tuple[pa.Table, dict[str, Any]]:
    """Table and facts of an open entry, the table still in its file.

    Raises:
        _Damaged: it is no entry, not ours, not whole, or one of something else.
        OSError: it cannot be read.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise _Damaged("no file of this user")
    told_until = status.st_size - _DIGEST_BYTES - _LENGTH.size
    if told_until < 0:
        raise _Damaged("cut off")
    # Read and not only mapped: a disk that cannot read a piece says so here, and would kill the process there.
    digest = _digest(descriptor, status.st_size - _DIGEST_BYTES, alive).digest()
    mapped = mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
    if mapped[-_DIGEST_BYTES:] != digest:
        raise _Damaged("its digest is another")
    try:
        (length,) = _LENGTH.unpack_from(mapped, told_until)
        told = json.loads(mapped[told_until - length : told_until])
        if told["made_from"] != made_from:
            raise _Damaged("of other data")
        table = pa.ipc.open_stream(pa.py_buffer(mapped).slice(0, told_until - length)).read_all()
        return table, dict(told["facts"])
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise _Damaged(str(error)) from error


def _digest(descriptor: int, size: int, alive: Alive) -> Any:
    """The XXH3 hash of the first `size` bytes of a file, open for more.

    Raises:
        _Damaged: there are fewer.
    """
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE))
    place = 0
    while place < size:
        got = os.preadv(descriptor, [piece[: size - place]], place)
        if got == 0:
            raise _Damaged("cut off")
        digest.update(piece[:got])
        place += got
        alive()
    return digest
