"""What waits for the database keeps its order, within a bound, whatever the disk does."""

import dataclasses
import errno
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import Connection

from app.runs.events.log import NewEvent
from worker.ingest.spool import Limits, RunUpdate, Spool

SMALL = Limits(memory_events=3, memory_bytes=200, disk_bytes=2000, steps=5, segment_bytes=300)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def line(text: str, ts: datetime = NOON) -> NewEvent:
    return NewEvent("log", ts, text)


def nothing(_: Connection) -> None: ...


def everything(spool: Spool, at_once: int = 2) -> list[NewEvent | RunUpdate]:
    taken: list[NewEvent | RunUpdate] = []
    while head := spool.first_items(at_once):
        taken += head
        spool.drop_first(len(head))
    assert len(spool) == 0 and not spool.is_full
    return taken


@pytest.fixture
def spool(tmp_path: Path) -> Any:
    spool = Spool("run", tmp_path / "home" / "spool", SMALL)
    yield spool
    spool.close()


events = st.builds(
    NewEvent,
    st.sampled_from(["log", "metric", "eval"]),
    st.datetimes(timezones=st.just(UTC)),
    st.text(st.characters(exclude_categories=()), max_size=120),
)
items = st.one_of(events, st.builds(RunUpdate, st.just(nothing), st.none() | events))
actions = st.lists(st.one_of(items, st.integers(1, 6)), max_size=80)


@given(
    actions=actions,
    limits=st.builds(Limits, *(st.integers(1, most) for most in (5, 300, 1500, 4, 400))),
    refused_writes=st.sets(st.integers(0, 60)),
)
# Room in memory again, while older events wait on the disk.
@example(
    actions=[line("a"), line("b"), line("c"), 1, line("d")],
    limits=Limits(1, 300, 1500, 4, 400),
    refused_writes=set(),
)
def test_order_and_content_do_not_depend_on_where_events_wait(
    actions: list[NewEvent | RunUpdate | int], limits: Limits, refused_writes: set[int]
) -> None:
    """Puts and takes in any order, with any limits, and a disk that refuses some writes or takes them in part."""
    spool, put, taken, writes = Spool("run", Path(tempfile.gettempdir()), limits), [], [], 0
    pwrite = os.pwrite

    def unreliable(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes in refused_writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data[: max(1, len(data) // 2)], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", unreliable)
        for action in actions:
            if isinstance(action, int):
                head = spool.first_items(action)
                assert 0 < len(head) <= action or len(spool) == 0
                spool.drop_first(len(head))
                taken += head
            else:
                spool.enqueue_item(action)
                put.append(action)
            assert len(spool) == len(put) - len(taken)
        taken += everything(spool)
    spool.close()
    assert taken == put


@pytest.mark.parametrize("text", ["", "\x00", "a\ud800b", "ä🙂" * 20, "\r\n"])
def test_any_text_comes_back_from_the_disk_as_it_was(spool: Spool, text: str) -> None:
    put = [line(text, datetime(2026, 1, 1, 12, 0, 0, microsecond, UTC)) for microsecond in range(5)]
    for item in put:
        spool.enqueue_item(item)
    assert spool._segments
    assert everything(spool) == put


def test_the_disk_is_bounded_then_writers_have_to_wait(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    count = 0
    while not spool.is_full:
        spool.enqueue_item(line(f"{count:050}"))
        count += 1
        assert count < 100
    assert 20 < count < 45, "2,000 bytes on disk and three in memory"
    spool.enqueue_item(line("said before the trainer noticed"))
    assert [record.levelname for record in caplog.records] == ["WARNING"], "one line, not one for each event"
    assert "training waits" in caplog.text
    taken = everything(spool)
    assert [item.data for item in taken if isinstance(item, NewEvent)] == [
        *(f"{number:050}" for number in range(count)),
        "said before the trainer noticed",
    ]


def test_the_disk_is_free_again_when_all_is_taken(spool: Spool) -> None:
    for _ in range(3):
        for number in range(30):
            spool.enqueue_item(line(f"{number:040}"))
        assert not spool.is_full
        everything(spool)
    assert not spool._segments


def test_changes_of_the_run_are_bounded_too(spool: Spool) -> None:
    for _ in range(8):
        assert not spool.is_full
        spool.enqueue_item(RunUpdate(nothing))
    assert spool.is_full
    everything(spool)


def test_spool_files_are_private_and_vanish_with_the_process(spool: Spool, tmp_path: Path) -> None:
    for number in range(20):
        spool.enqueue_item(line(f"secret {number:040}"))
    folder = tmp_path / "home" / "spool"
    assert spool._segments and list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_disk_that_refuses_makes_the_trainer_wait_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    spool = Spool("run", tmp_path / "file" / "spool", SMALL)
    for number in range(10):
        spool.enqueue_item(line(str(number)))
    assert spool.is_full
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert [item.data for item in everything(spool) if isinstance(item, NewEvent)] == list("0123456789")


def test_the_reserve_of_the_disk_is_kept(tmp_path: Path) -> None:
    spool = Spool("run", tmp_path / "spool", dataclasses.replace(SMALL, disk_reserve_bytes=2**60))
    for number in range(10):
        spool.enqueue_item(line(str(number)))
    assert spool.is_full and not list((tmp_path / "spool").iterdir())
    assert [item.data for item in everything(spool) if isinstance(item, NewEvent)] == list("0123456789")


def test_a_disk_that_has_recovered_is_used_again(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        for number in range(10):
            spool.enqueue_item(line(str(number)))
        assert spool.is_full
    everything(spool)
    for number in range(10):
        spool.enqueue_item(line(str(number)))
    assert not spool.is_full


def test_a_large_event_goes_through_alone(spool: Spool) -> None:
    for item in (line("small"), line("x" * 1500), line("small")):
        spool.enqueue_item(item)
    assert [len(item.data) for item in everything(spool) if isinstance(item, NewEvent)] == [5, 1500, 5]
