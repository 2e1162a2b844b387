"""Files that a training process appends to: a full disk neither ends it nor tears a line."""

import errno
import json
import os
from pathlib import Path

import pytest

from tests.small_disk import fill, small_disk
from worker.training.run_state import History
from worker.wire.journal import Journal, read_journal
from worker.wire.waiting_bytes import WaitingBytes


@pytest.mark.needs("small disk")
class TestFullDisk:
    def test_lines_wait_in_memory_and_are_written_in_order_once_there_is_room(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", 2**20) as disk:
            history, journal = History(disk), Journal(disk / "journal.jsonl", 1)
            history.start_from(None)
            journal.record_start()
            filler = fill(disk)
            for step in range(1, 201):
                history.append_record({"step": step, "text": "x" * 100})
                journal.record_step(step, (1.0).hex(), list(range(60)))
            journal.record_save(200)
            steps = [line["step"] for line in read_journal(disk / "journal.jsonl") if line["event"] == "step"]
            assert 100 < len(steps) < 200, "the first lines have room, the last ones have none"
            assert (disk / "metrics.jsonl").stat().st_size < 201 * 100, "the disk was not full"
            saved = tmp_path / "checkpoint"
            saved.mkdir()
            history.copy_to(saved)
            expected = [{"step": step, "text": "x" * 100} for step in range(1, 201)]
            assert history.records() == expected
            assert [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()] == expected
            filler.unlink()
            history.append_record({"step": 201})
            journal.record_step(201, (1.0).hex(), [])
            assert history.records() == [*expected, {"step": 201}]
            assert (disk / "metrics.jsonl").read_bytes().count(b"\n") == 201
            events = read_journal(disk / "journal.jsonl")
            assert [line["step"] for line in events if line["event"] == "step"] == list(range(1, 202))
            assert [line["event"] for line in events][-2:] == ["save", "step"]

    def test_a_journal_whose_start_does_not_fit_ends_the_attempt(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", 2**20) as disk:
            fill(disk)
            journal = Journal(disk / "journal.jsonl", 1)
            with pytest.raises(OSError, match="No space left"):
                journal.record_start()


def test_other_errors_and_more_than_memory_should_hold_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        WaitingBytes().append(closed, b"line")
    os.close(closed)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    waiting = WaitingBytes()
    waiting.append(1, b"x" * 2**24)
    with pytest.raises(OSError, match="No space"):
        waiting.append(1, b"x")
