"""The seed reproduces the schedule, and every fault is scheduled."""

from collections import Counter

from tests.chaos.campaign import Result, schedule
from tests.chaos.checker import MOMENTS, MOMENTS_OF_WRONG_CLOCKS
from tests.chaos.faults import FAULTS
from tests.chaos.history import Violation


def test_the_same_seed_gives_the_same_faults() -> None:
    assert schedule(7, 200) == schedule(7, 200)
    assert schedule(7, 200) != schedule(8, 200)


def test_every_fault_has_its_turn_once_in_a_deck() -> None:
    for seed in range(20):
        assert Counter(schedule(seed, 3 * len(FAULTS))) == dict.fromkeys(FAULTS, 3)


def test_a_window_without_a_hit_fails_the_campaign() -> None:
    result = Result(seed=1, rounds=1)
    result.faults["torn_save"] = 1
    assert result.missed == ["torn save"] and not result.held
    result.hits["torn save"] = 1
    assert result.held
    result.violations.append(Violation(3, "run_x", "two trainers"))
    assert not result.held


def test_a_campaign_that_excused_every_loss_fails() -> None:
    result = Result(seed=1, rounds=len(FAULTS))
    result.counted[MOMENTS] = 100
    assert MOMENTS not in result.missed and MOMENTS_OF_WRONG_CLOCKS in result.missed
    result.counted[MOMENTS_OF_WRONG_CLOCKS] = 10
    assert MOMENTS_OF_WRONG_CLOCKS not in result.missed
