"""Fault injection into processes has the intended effect."""

import fcntl
from pathlib import Path

import pytest

from tests.chaos.inject import lock_nothing
from tests.chaos.world import RUN_LOCK
from worker.process import child


def _is_taken(path: Path) -> bool:
    with path.open("w") as first, path.open("w") as second:
        return child._is_taken(first.fileno()) and not child._is_taken(second.fileno())


def test_run_lock_on_the_second_host_excludes_no_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)
    assert _is_taken(tmp_path / RUN_LOCK)
    lock_nothing(RUN_LOCK)
    assert not _is_taken(tmp_path / RUN_LOCK)
    assert _is_taken(tmp_path / "cpu-0")
