"""Promise 15: alive means progress. A trainer that hangs while its supervisor beats is found."""

from contextlib import suppress
from typing import Any

import pytest

from tests.stack import Stack, is_alive, pids_of_trainers
from tests.waiting import eventually

LIMIT_SECONDS = 8.0
"""Of silence, times the machine's slowness: also longer than a busy machine stops a process."""


@pytest.fixture(scope="module")
def ended(shared_stack: Stack) -> dict[str, dict[str, Any]]:
    """The runs of all tests, which one worker trained at the same time, by what their trainers do.

    Of each, `live_trainers` are the processes that were still alive before the end of the worker ended them.
    """
    stack = shared_stack
    hangs = {"steps": 20, "step_seconds": 0.01, "hang_at_step": 5, "faults_until_attempt": 1}
    slow = {"steps": 5, "step_seconds": 2.0 * stack.slowness, "log_lines_per_step": 0}
    measured_rarely = {"steps": 11, "step_seconds": stack.slowness, "log_lines_per_step": 0}
    ids = {
        "hangs once": stack.create(hangs, {"save_steps": 2}),
        "hangs each time": stack.create({"load_seconds": 600}, max_restarts=1),
        "works in silence": stack.create(slow, {"logging_steps": 1}),
        "has nothing to report": stack.create(measured_rarely, {"logging_steps": 1000}),
    }
    worker = stack.add_worker(slots=len(ids), hang_seconds=LIMIT_SECONDS * stack.slowness)

    def have_ended() -> bool:
        return all(stack.run(run_id)["status"] in ("completed", "failed") for run_id in ids.values())

    with suppress(AssertionError):  # the test of a run that has not ended fails
        eventually(have_ended, timeout=100 * stack.slowness)
    live_trainers = {
        what: [pid for pid in pids_of_trainers(stack.journal(run_id)) if is_alive(pid)] for what, run_id in ids.items()
    }
    worker.kill()
    stack.workers.clear()
    return {what: {**stack.run(run_id), "live_trainers": live_trainers[what]} for what, run_id in ids.items()}


def test_a_trainer_that_falls_silent_is_killed_and_its_run_goes_on(
    stack: Stack, ended: dict[str, dict[str, Any]]
) -> None:
    shown = ended["hangs once"]
    assert (shown["status"], shown["attempt"]) == ("completed", 2)
    reasons = [event["reason"] for event in stack.events(shown["id"]) if event["type"] == "status"]
    said = "the training process hung during training and was killed: it had neither reported nor printed anything for"
    assert any(said in reason for reason in reasons), reasons
    steps = [line["step"] for line in stack.journal(shown["id"]) if line["event"] == "step"]
    assert steps == list(range(1, 21)), "from the checkpoint of step 4"


def test_run_that_hangs_each_time_is_failed_after_its_restarts(stack: Stack, ended: dict[str, dict[str, Any]]) -> None:
    shown = ended["hangs each time"]
    assert (shown["status"], shown["attempt"], shown["error_code"]) == ("failed", 2, "worker_lost")
    assert "hung during loading" in shown["error_message"]
    assert len(pids_of_trainers(stack.journal(shown["id"]))) == 2 and shown["live_trainers"] == []


def test_silent_but_working_trainer_is_not_killed(ended: dict[str, dict[str, Any]]) -> None:
    """A step says nothing until it is done, and each is shorter than the limit."""
    assert (ended["works in silence"]["status"], ended["works in silence"]["attempt"]) == ("completed", 1)


def test_trainer_that_reports_metrics_rarely_is_not_killed(stack: Stack, ended: dict[str, dict[str, Any]]) -> None:
    """Steps that are measured rarely: that each of them got done is heard, and no event comes of it."""
    shown = ended["has nothing to report"]
    assert (shown["status"], shown["attempt"]) == ("completed", 1)
    assert [event["step"] for event in stack.events(shown["id"]) if event["type"] == "metric"] == [11]
