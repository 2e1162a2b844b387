"""The phases of all steps between two metrics count, however many there are, in bounded memory."""

import pytest

from worker.training.measurement import step_phases
from worker.training.measurement.step_phases import StepPhases


def test_phases_of_any_number_of_steps_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def next_second() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(step_phases.time, "monotonic", next_second)
    phases, steps = StepPhases(is_enabled=True, on_gpu=False), 2 * step_phases._MOST_MOMENTS
    for _ in range(steps):
        for phase in ("forward", "backward", None):
            phases.enter_phase(phase)
        assert len(phases._starts) <= step_phases._MOST_MOMENTS
    assert phases.take_seconds() == {"forward_seconds": steps, "backward_seconds": steps}
    assert phases.take_seconds() == {}


def test_phases_that_are_not_requested_are_not_measured() -> None:
    phases = StepPhases(is_enabled=False, on_gpu=True)
    phases.enter_phase("forward")
    phases.enter_phase(None)
    assert phases.take_seconds() == {}
