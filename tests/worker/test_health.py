"""A worker that cannot work takes no runs, and costs those that it took nothing."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker import health
from worker.health import WorkerHealth


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    (tmp_path / "datasets").mkdir()
    return tmp_path


def test_all_is_well_with_a_storage_that_has_room(storage: Path) -> None:
    assert WorkerHealth(storage).unhealthy_reason() is None


def test_a_full_storage_takes_no_run_until_there_is_room(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        full = SimpleNamespace(f_files=0, f_blocks=10**6, f_bavail=health.ROOM_BYTES // 4096 - 1, f_frsize=4096)
        patched.setattr(os, "statvfs", lambda _: full)
        assert "full: free some space" in (WorkerHealth(storage).unhealthy_reason() or "")
    assert WorkerHealth(storage).unhealthy_reason() is None


def test_a_file_system_that_counts_no_blocks_is_not_full(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncounted = SimpleNamespace(f_files=0, f_blocks=0, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: uncounted)
    assert WorkerHealth(storage).unhealthy_reason() is None


def test_a_storage_that_is_not_there_or_not_mounted_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'elsewhere'} is not available" in (
        WorkerHealth(tmp_path / "elsewhere").unhealthy_reason() or ""
    )
    assert f"{tmp_path} holds no datasets" in (WorkerHealth(tmp_path).unhealthy_reason() or "")


def test_a_device_pauses_for_longer_each_time_it_fails_until_a_run_has_trained_on_it(storage: Path) -> None:
    worker = WorkerHealth(storage)
    assert [worker.device_failed(0) for _ in range(8)] == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert worker.device_failed(1) == 60
    assert worker.device_worked(0) and not worker.device_worked(0)
    assert worker.device_failed(0) == 60


def test_it_pauses_for_longer_each_time_a_run_cannot_be_started(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    worker = WorkerHealth(storage)

    def pause() -> float:
        nonlocal now
        worker.record_failed_start("no more processes")
        assert "could not be started here: no more processes" in (worker.unhealthy_reason() or "")
        began = now
        while worker.unhealthy_reason():
            now += 1.0
        return now - began

    assert [pause() for _ in range(5)] == [5.0, 10.0, 20.0, 30.0, 30.0]
    worker.record_start()
    assert pause() == 5.0
