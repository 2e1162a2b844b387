"""The checker accepts a correct history and reports exactly the broken promise of each modified history."""

import pytest

from tests.chaos.broken import BROKEN
from tests.chaos.checker import MOMENTS, Report, check
from tests.chaos.history import History
from tests.chaos.odd import RIGHT
from tests.chaos.spoiling import Spoil, fault_added
from tests.chaos.synthetic import correct


@pytest.fixture(scope="module")
def history() -> History:
    return correct()


@pytest.fixture(scope="module")
def report(history: History) -> Report:
    return check(history)


def test_a_correct_history_breaks_nothing(report: Report) -> None:
    assert report.violations == []


@pytest.mark.parametrize("happened", [pytest.param(happened, id=what) for what, happened in RIGHT])
def test_what_may_rightly_happen_breaks_nothing(history: History, happened: Spoil) -> None:
    assert check(happened(history)).violations == []


@pytest.mark.parametrize(
    ("promise", "spoil"), [pytest.param(number, spoil, id=f"{number}: {what}") for number, what, spoil in BROKEN]
)
def test_each_broken_promise_is_reported_and_no_other(history: History, promise: int, spoil: Spoil) -> None:
    violations = check(spoil(history)).violations
    assert {violation.promise for violation in violations} == {promise}, violations


def test_every_promise_can_be_seen_broken() -> None:
    assert {number for number, _, _ in BROKEN} == set(range(1, 21))


def test_what_was_compared_is_counted(report: Report, history: History) -> None:
    assert report.counted["runs"] == len(history.runs)
    assert report.counted["events"] == report.counted["stream events compared"] > 300
    assert all(report.counted.values()), report.counted


def test_moments_are_not_counted_while_a_fault_explains_any_loss(history: History) -> None:
    def moments(target: str) -> int:
        return check(fault_added("kill_worker", target, 0.0, 2e9)(history)).counted[MOMENTS]

    assert moments("postgres") == moments("worker-1 ckpt_1") == 0
    assert moments("worker-2") == moments("storage") == check(history).counted[MOMENTS] > 10


def test_the_windows_that_were_hit_are_seen(report: Report) -> None:
    expected = {
        "requeued:lost", "requeued:handed_back", "failed instead of requeued:retried", "resumed from checkpoint",
        "child resumed from checkpoint", "resumed from the start", "rolled back steps", "stop while running",
        "stop while pending", "fell back past a damaged checkpoint", "replayed creation", "stream reconnects",
        "creation that was never answered",
    }  # fmt: skip
    assert expected - set(report.observed) == set()
