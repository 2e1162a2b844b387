"""Clocks that are set while the service runs, and ids that are made by them."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from app.infra import clock, ids
from app.infra.clock import ClockWatch, SteadyClock

DAYS = 86_400.0


class Clocks:
    """The clocks of a machine, which move when a test says so."""

    CLOCK_BOOTTIME = 7

    def __init__(self) -> None:
        self.wall, self.since_boot = 1_800_000_000.0, 5000.0

    def time(self) -> float:
        return self.wall

    def clock_gettime(self, _: int) -> float:
        return self.since_boot

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.since_boot += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(clock, "time", clocks)
    return clocks


@pytest.fixture
def new_seconds(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Makes an id; returns its time, relative to the clock at first."""
    monkeypatch.setattr(ids, "_clock", SteadyClock())
    monkeypatch.setattr(ids, "_last", 0)
    first = clocks.wall

    def new() -> float:
        milliseconds = 0
        for letter in ids.new_id("run").removeprefix("run_"):
            milliseconds = milliseconds << 5 | ids._ALPHABET.index(letter)
        return (milliseconds >> 80) / 1000 - first

    return new


class TestIds:
    def test_ids_do_not_follow_a_clock_that_is_wrong_for_seconds(
        self, clocks: Clocks, new_seconds: Callable[[], float]
    ) -> None:
        for jump in (200 * DAYS, -200 * DAYS):
            clocks.wall += jump
            assert new_seconds() == pytest.approx(0, abs=1)
            clocks.wall -= jump
            assert new_seconds() == pytest.approx(0, abs=1)

    def test_follow_a_clock_that_stays_where_it_was_set(self, clocks: Clocks, new_seconds: Callable[[], float]) -> None:
        for jump in (200 * DAYS, -200 * DAYS):
            clocks.wall += jump
            new_seconds()
            clocks.pass_by(601)
            new_seconds()
        assert new_seconds() == pytest.approx(2 * 601, abs=1), "not ahead until the process restarts"

    def test_sort_by_creation_although_the_clock_was_set_back_by_an_hour(
        self, clocks: Clocks, new_seconds: Callable[[], float]
    ) -> None:
        run_ids = [ids.new_id("run")]
        clocks.wall -= 3600
        for _ in range(20):
            clocks.pass_by(60)
            run_ids.append(ids.new_id("run"))
        assert run_ids == sorted(run_ids)

    def test_follow_corrections_of_a_clock_that_drifts(self, clocks: Clocks, new_seconds: Callable[[], float]) -> None:
        for _ in range(100):
            clocks.pass_by(10)
            clocks.wall += 0.5
            new_seconds()
        assert new_seconds() == pytest.approx(100 * 10.5, abs=1)


class TestClockWatch:
    @pytest.mark.parametrize("change", [120.0, 200 * DAYS, -3600.0])
    def test_clock_change_is_reported_once_with_its_seconds(self, change: float) -> None:
        watch, wall = ClockWatch(tolerance_seconds=1), time.time()
        assert watch.observe(datetime.fromtimestamp(wall, UTC), 10.0, 10.1) == 0
        assert watch.observe(datetime.fromtimestamp(wall + 5 + change, UTC), 15.0, 15.2) == pytest.approx(change, abs=1)
        assert watch.observe(datetime.fromtimestamp(wall + 9 + change, UTC), 19.0, 19.0) == 0

    def test_late_answer_is_not_reported_as_a_clock_change(self) -> None:
        watch, wall = ClockWatch(tolerance_seconds=1), time.time()
        watch.observe(datetime.fromtimestamp(wall, UTC), 10.0, 40.0)
        assert watch.observe(datetime.fromtimestamp(wall + 2, UTC), 41.0, 41.0) == 0
