"""Promise 15: alive means progress. A trainer that hangs while its supervisor beats is found."""

from tests.stack import Stack, is_alive, pids_of_trainers

HANGS = {"steps": 20, "step_seconds": 0.01, "hang_at_step": 5}


def test_a_trainer_that_falls_silent_is_killed_and_its_run_goes_on(stack: Stack) -> None:
    run_id = stack.create({**HANGS, "faults_until_attempt": 1}, {"save_steps": 2})
    stack.add_worker(hang_seconds=8 * stack.slowness)
    shown = stack.until(run_id, "completed", "failed", timeout=200)
    assert (shown["status"], shown["attempt"]) == ("completed", 2)
    reasons = [event["reason"] for event in stack.events(run_id) if event["type"] == "status"]
    said = "the training process hung during training and was killed: it had neither reported nor printed anything for"
    assert any(said in reason for reason in reasons), reasons
    steps = [line["step"] for line in stack.journal(run_id) if line["event"] == "step"]
    assert steps == list(range(1, 21)), "from the checkpoint of step 4"


def test_one_that_hangs_each_time_is_not_tried_for_ever(stack: Stack) -> None:
    run_id = stack.create({"load_seconds": 600}, max_restarts=1)
    stack.add_worker(hang_seconds=8 * stack.slowness)
    shown = stack.until(run_id, "completed", "failed", timeout=200)
    assert (shown["status"], shown["attempt"], shown["error_code"]) == ("failed", 2, "worker_lost")
    assert "hung during loading" in shown["error_message"]
    assert all(not is_alive(pid) for pid in pids_of_trainers(stack.journal(run_id)))


def test_one_that_works_in_silence_is_left_alone(stack: Stack) -> None:
    """A step says nothing until it is done, and each is shorter than the limit."""
    run_id = stack.create(
        {"steps": 5, "step_seconds": 2.0 * stack.slowness, "log_lines_per_step": 0}, {"logging_steps": 1}
    )
    stack.add_worker(hang_seconds=8 * stack.slowness)
    shown = stack.until(run_id, "completed", "failed", timeout=200)
    assert (shown["status"], shown["attempt"]) == ("completed", 1)


def test_one_that_has_nothing_to_report_for_longer_than_the_limit_is_left_alone_too(stack: Stack) -> None:
    """Steps that are measured rarely: that each of them got done is heard, and no event comes of it."""
    run_id = stack.create(
        {"steps": 11, "step_seconds": stack.slowness, "log_lines_per_step": 0}, {"logging_steps": 1000}
    )
    stack.add_worker(hang_seconds=8 * stack.slowness)
    shown = stack.until(run_id, "completed", "failed", timeout=200)
    assert (shown["status"], shown["attempt"]) == ("completed", 1)
    assert [event["step"] for event in stack.events(run_id) if event["type"] == "metric"] == [11]
