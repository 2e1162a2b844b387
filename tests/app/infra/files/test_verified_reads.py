"""Parts of stored files: what was read was compared with what was stored, whatever the store returns."""

import asyncio
import hashlib
import os
import threading
from pathlib import Path

import pytest

from app.infra.files.object_store import ObjectStore, StoreBusy, StoredFile, StoreUnavailable
from app.infra.files.verified_reads import PIECE_BYTES, CorruptContent, DigestFolder, VerifiedReads

CONTENT = os.urandom(2 * PIECE_BYTES + 12_345)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    return path


def create_reads(file: Path, call_seconds: float = 10) -> VerifiedReads:
    return VerifiedReads(call_seconds, DigestFolder(file.parent / "digests"))


def open_stored(path: Path) -> StoredFile:
    (path.parent / ".anneal-checkpoints").touch()
    return ObjectStore(f"file://{path.parent}", "ANNEAL_STORAGE").open(path.name)


def change_byte(file: Path, position: int) -> None:
    """Change the byte at a position, or add one there; the second time changes it back."""
    with file.open("r+b") as opened:
        opened.seek(position)
        before = opened.read(1) or b"\0"
        opened.seek(position)
        opened.write(bytes([before[0] ^ 1]))


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, len(CONTENT)])
async def test_parts_are_those_of_the_file(file: Path, size: int) -> None:
    content = CONTENT[:size]
    os.truncate(file, size)
    opened = await create_reads(file).open_verified(open_stored(file), hashlib.sha256(content).hexdigest())
    assert opened.read() == content
    for start, end in [(0, 1), (size // 2, size // 2 + 7), (PIECE_BYTES - 3, PIECE_BYTES + 3), (size - 1, size + 9)]:
        opened.seek(max(start, 0))
        assert opened.read(end - max(start, 0)) == content[max(start, 0) : end]


async def test_part_of_a_changed_piece_is_not_returned_and_those_of_others_are(file: Path) -> None:
    reads = create_reads(file)
    await reads.open_verified(open_stored(file), SHA256)
    change_byte(file, PIECE_BYTES)
    opened = await reads.open_verified(open_stored(file), SHA256)
    assert opened.read(PIECE_BYTES) == CONTENT[:PIECE_BYTES]
    opened.seek(2 * PIECE_BYTES - 1)
    with pytest.raises(CorruptContent):
        opened.read(1)
    opened.seek(2 * PIECE_BYTES)
    assert opened.read() == CONTENT[2 * PIECE_BYTES :]
    with pytest.raises(CorruptContent):
        await reads.open_verified(open_stored(file), SHA256, again=True)


@pytest.mark.parametrize("position", [0, PIECE_BYTES - 1, len(CONTENT) - 1, len(CONTENT)])
async def test_file_with_another_digest_is_not_opened_and_is_read_again_later(file: Path, position: int) -> None:
    reads = create_reads(file)
    change_byte(file, position)
    with pytest.raises(CorruptContent):
        await reads.open_verified(open_stored(file), SHA256)
    change_byte(file, position)
    os.truncate(file, len(CONTENT))
    assert (await reads.open_verified(open_stored(file), SHA256)).read() == CONTENT


async def test_file_of_another_size_is_not_opened(file: Path) -> None:
    for size in (len(CONTENT) - 1, PIECE_BYTES, 0):
        os.truncate(file, size)
        with pytest.raises(CorruptContent):
            await create_reads(file).open_verified(open_stored(file), SHA256)


async def test_file_that_becomes_shorter_while_it_is_compared_is_not_opened(file: Path) -> None:
    stored = open_stored(file)
    os.truncate(file, PIECE_BYTES + 5)
    with pytest.raises(CorruptContent):
        await create_reads(file).open_verified(stored, SHA256)


class _Slow(StoredFile):
    """File of a store that answers once `gate` is set."""

    def __init__(self, file: Path) -> None:
        self.gate, self.reads = threading.Event(), 0
        self._opened = open_stored(file)
        super().__init__(self._opened._store, self._opened._file, self._opened.key)

    def read(self, size: int = -1, /) -> bytes:
        self.reads += 1
        self.gate.wait(30)
        return super().read(size)


async def test_requests_share_a_comparison_that_goes_on_when_they_have_given_up(file: Path) -> None:
    reads, slow = create_reads(file), _Slow(file)
    reads._patience = 0.1
    refused = await asyncio.gather(*(reads.open_verified(slow, SHA256) for _ in range(5)), return_exceptions=True)
    assert [type(error) for error in refused] == [StoreBusy] * 5 and slow.reads == 1
    slow.gate.set()
    reads._patience = 10.0
    assert (await reads.open_verified(open_stored(file), SHA256)).read() == CONTENT
    assert slow.reads == 3 and reads.knows(SHA256)


async def test_silent_store_is_reported_as_such(file: Path) -> None:
    slow = _Slow(file)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await create_reads(file, 0.2).open_verified(slow, SHA256)
    slow.gate.set()


class _Interrupted(StoredFile):
    """File of a store that is busy at one of the reads, or silent until `gate` is set."""

    def __init__(self, file: Path, fails_at: int = 0, *, is_silent: bool = False) -> None:
        self.gate, self.positions, self._fails_at, self._is_silent = threading.Event(), list[int](), fails_at, is_silent
        self._opened = open_stored(file)
        super().__init__(self._opened._store, self._opened._file, self._opened.key)

    def read(self, size: int = -1, /) -> bytes:
        self.positions.append(self.tell())
        if len(self.positions) == self._fails_at:
            if not self._is_silent:
                raise StoreBusy("all connections are in use")
            self.gate.wait(30)
        return super().read(size)


@pytest.mark.parametrize("is_silent", [False, True])
async def test_comparison_that_a_busy_or_silent_store_interrupts_is_continued(file: Path, is_silent: bool) -> None:
    reads = create_reads(file, 0.2 if is_silent else 10)
    interrupted, later = _Interrupted(file, 2, is_silent=is_silent), _Interrupted(file)
    with pytest.raises(StoreUnavailable):
        await reads.open_verified(interrupted, SHA256)
    interrupted.gate.set()  # the late answer changes nothing
    opened = await reads.open_verified(later, SHA256)
    assert later.positions == [PIECE_BYTES, 2 * PIECE_BYTES]
    assert opened.read() == CONTENT


async def test_large_file_is_not_compared_again_after_a_restart_unless_its_stored_digests_are_damaged(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = file.parent / "digests"
    await create_reads(file).open_verified(open_stored(file), SHA256)
    assert not folder.exists(), "a small file is read whole as fast"
    monkeypatch.setattr("app.infra.files.verified_reads._LARGE_BYTES", 2 * PIECE_BYTES)
    await create_reads(file).open_verified(open_stored(file), SHA256)
    after_restart = _Interrupted(file)
    opened = await create_reads(file).open_verified(after_restart, SHA256)
    assert after_restart.positions == [] and opened.read() == CONTENT
    change_byte(file, PIECE_BYTES)
    opened = await create_reads(file).open_verified(open_stored(file), SHA256)
    with pytest.raises(CorruptContent):
        opened.read()
    change_byte(file, PIECE_BYTES)
    (stored,) = folder.iterdir()
    stored.write_text(stored.read_text().replace("a", "b"))
    compared = _Interrupted(file)
    await create_reads(file).open_verified(compared, SHA256)
    assert len(compared.positions) == 3


def test_oldest_stored_digests_are_removed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.infra.files.verified_reads._MAX_DIGEST_BYTES", 1000)
    stored = DigestFolder(tmp_path / "digests")
    for age, name in enumerate(("a", "b", "c")):
        stored.write_digests(name, bytes(320))
        os.utime(tmp_path / "digests" / name, (age, age))
    assert [name for name in ("a", "b", "c") if stored.read_digests(name, 10 * PIECE_BYTES)] == ["b", "c"]


async def test_least_recently_used_digests_are_forgotten_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.infra.files.verified_reads._MAX_DIGEST_BYTES", 64)
    reads = create_reads(file)
    for name in ("a", "b", "c"):
        reads.remember(name, bytes(32))
    assert [name for name in ("a", "b", "c") if reads.knows(name)] == ["b", "c"]
    reads.remember("d", bytes(96))
    assert reads.knows("d") and not reads.knows("c")
