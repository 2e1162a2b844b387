"""While the disk of the embedded database has little room, printed lines are not stored; without room, nothing is."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import Settings
from app.infra.db import sync_engine
from app.infra.files.disk_space import DatabaseReserve
from app.runs.events.log import NewEvent
from tests.waiting import eventually
from tests.worker.ingest.record_handler.lab import Lab
from worker.ingest.spool import RunUpdate


@pytest.fixture
def lab(settings: Settings, tmp_path: Path) -> Iterator[Lab]:
    (tmp_path / "postgres").mkdir()
    engine = sync_engine(settings.database_url or "")
    lab = Lab(settings, engine, DatabaseReserve(tmp_path))
    with lab.writer:
        yield lab
    engine.dispose()


def disk_with(free: int) -> Any:
    return lambda _: SimpleNamespace(f_files=0, f_blocks=2**30, f_bavail=free // 4096, f_frsize=4096)


def lines(lab: Lab) -> list[str]:
    return [data["line"] for type, data in lab.events() if type == "log"]


def metrics(lab: Lab) -> list[int]:
    return [data["step"] for type, data in lab.events() if type == "metric"]


def test_printed_lines_give_way_to_what_the_run_reports_and_the_last_ones_are_kept_for_its_end(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", disk_with(free=500 * 2**20))  # of which 1 GiB is to stay free
    lab.prints("a\nb\n")
    lab.says("metric", step=1, loss=1.0)
    lab.writer.drain()
    (warning,) = (line for line in lines(lab) if "complete log" not in line)
    assert "printed lines are not stored" in warning and "500 MiB free" in warning
    assert [type for type, _ in lab.events()].count("metric") == 1
    lab.record_handler.flush_output()
    lab.writer.drain()
    assert lines(lab)[-2:] == ["a", "b"]


def test_lines_are_stored_again_with_a_note_of_how_many_are_missing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", disk_with(free=500 * 2**20))
        lab.prints("a\nb\n")
    monkeypatch.setattr(os, "statvfs", disk_with(free=2**40))
    lab.prints("c\n")
    lab.writer.drain()
    note, line = lines(lab)[-2:]
    assert note.startswith("… 2 lines left out: the disk of the database has only 500 MiB free") and line == "c"


def test_without_room_events_wait_and_are_stored_in_order_once_there_is_some(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", disk_with(free=50 * 2**20))
        for step in range(1, 4):
            lab.says("metric", step=step, loss=1.0)
        eventually(lambda: "what the run reports waits" in caplog.text)
        assert metrics(lab) == []
    monkeypatch.setattr(os, "statvfs", disk_with(free=2**40))
    eventually(lambda: len(metrics(lab)) == 3)
    assert metrics(lab) == [1, 2, 3]


def test_room_that_runs_out_while_waiting_events_are_stored_ends_that(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    little, enough = disk_with(free=50 * 2**20), disk_with(free=2**40)
    disk = [little]
    monkeypatch.setattr(os, "statvfs", lambda path: disk[-1](path))
    first, second = (NewEvent.from_payload("metric", float(step), {"step": step, "loss": 1.0}) for step in (1, 2))
    lab.writer.enqueue_item(RunUpdate(lambda _: disk.append(little), first))
    lab.writer.enqueue_item(second)
    eventually(lambda: caplog.text.count("what the run reports waits") == 1)
    disk.append(enough)
    eventually(lambda: caplog.text.count("what the run reports waits") == 2)
    assert metrics(lab) == [1]


def test_what_waits_in_a_worker_that_is_to_end_is_stored_in_the_reserve(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "statvfs", disk_with(free=50 * 2**20))
    lab.says("metric", step=1, loss=1.0)
    eventually(lambda: "what the run reports waits" in caplog.text)
    lab.draining.set()
    eventually(lambda: metrics(lab) == [1])
