"""A worker that cannot work takes no runs, and costs those that it took nothing."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker import fitness
from worker.fitness import Fitness


def test_all_is_well_with_a_storage_that_has_room(tmp_path: Path) -> None:
    assert Fitness(tmp_path).trouble() is None


def test_a_full_storage_takes_no_run_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        full = SimpleNamespace(f_bavail=fitness.ROOM_BYTES // 4096 - 1, f_frsize=4096)
        patched.setattr(os, "statvfs", lambda _: full)
        assert "full: make room" in (Fitness(tmp_path).trouble() or "")
    assert Fitness(tmp_path).trouble() is None


def test_a_storage_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'elsewhere'} is not there" in (Fitness(tmp_path / "elsewhere").trouble() or "")


def test_it_pauses_for_longer_each_time_a_run_cannot_be_started_and_not_at_all_once_one_could(tmp_path: Path) -> None:
    worker = Fitness(tmp_path)
    pauses = [worker.failed("no more processes") for _ in range(12)]
    assert pauses[:4] == [2.0, 4.0, 8.0, 16.0] and pauses[-1] == pauses[-2] == 300.0
    assert "no more processes; no run is taken for another 300 s" in (worker.trouble() or "")
    worker.started()
    assert worker.failed("again") == 2.0
