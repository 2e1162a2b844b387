"""Promise 19: the database goes away and comes back, for a moment or for longer than the lease."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.stack import Stack, assert_attempts_never_overlap, is_alive, pids_of_trainers
from tests.waiting import eventually

SLOW = {"steps": 150, "step_seconds": 0.05, "log_lines_per_step": 1}
WITHOUT_OWN_CHECKPOINTS = {"save_steps": 1000}


@contextmanager
def away(stack: Stack, how: str) -> Iterator[None]:
    """PostgreSQL does not answer (stopped: connections hang) or is not there (killed: they are refused)."""
    server = stack.servers.postgres
    assert server is not None
    everyone = [
        psutil.Process(server.process.pid),
        *psutil.Process(server.process.pid).children(recursive=True),
    ]
    for process in everyone:
        if process.is_running():
            process.suspend() if how == "stopped" else process.kill()
    try:
        yield
    finally:
        if how == "stopped":
            for process in everyone:
                if process.is_running():
                    process.resume()
        else:
            server.process.wait(timeout=30)
            server.start()
            server.wait_ready()


def last_step(stack: Stack, run_id: str) -> int:
    return max((line.get("step", 0) for line in stack.journal(run_id)), default=0)


def losses(stack: Stack, run_id: str) -> dict[int, str]:
    return {line["step"]: line["loss_hex"] for line in stack.journal(run_id) if line["event"] == "step"}


def steps_of(stack: Stack, run_id: str, attempt: int) -> list[int]:
    return [line["step"] for line in stack.journal(run_id) if line["attempt"] == attempt and line["event"] == "step"]


def printed(stack: Stack, run_id: str) -> list[int]:
    """The steps of which the trainer's own line is stored, in the order of the events."""
    lines = [event["line"] for event in stack.events(run_id) if event.get("stream") == "stdout"]
    return [int(line.split()[1]) for line in lines]


@pytest.fixture(scope="module")
def undisturbed(shared_stack: Stack) -> dict[int, str]:
    worker = shared_stack.add_worker()
    run_id = shared_stack.create({**SLOW, "step_seconds": 0.0})
    shared_stack.until(run_id, "completed")
    worker.kill()
    return losses(shared_stack, run_id)


@pytest.mark.parametrize("how", ["stopped", "killed"])
class TestShorterThanTwoThirdsOfTheLease:
    def test_training_goes_on_and_every_line_of_the_meantime_is_stored_in_order(
        self, stack: Stack, undisturbed: dict[int, str], how: str
    ) -> None:
        run_id = stack.create(SLOW)
        stack.add_worker(lease_seconds=30)
        stack.until_step(run_id, 5)
        with away(stack, how):
            before = last_step(stack, run_id)
            stack.until_step(run_id, before + 40)
        shown = stack.until(run_id, "completed")
        assert shown["attempt"] == 1
        assert printed(stack, run_id) == list(range(1, 151))
        assert losses(stack, run_id) == undisturbed


@pytest.mark.parametrize("how", ["stopped", "killed"])
class TestLongerThanTheLease:
    def test_the_trainer_goes_what_it_said_is_stored_and_the_run_resumes_from_a_checkpoint_of_the_meantime(
        self, stack: Stack, undisturbed: dict[int, str], how: str
    ) -> None:
        run_id = stack.create(SLOW, WITHOUT_OWN_CHECKPOINTS)
        stack.add_worker()
        stack.until_step(run_id, 10)
        (first,) = pids_of_trainers(stack.journal(run_id))
        with away(stack, how):
            before = last_step(stack, run_id)
            limit = stack.settings.kill_after_seconds + 1
            eventually(
                lambda: not is_alive(first), timeout=limit, what="the trainer is gone by two thirds of the lease"
            )
            said = steps_of(stack, run_id, 1)
            # Until the lease has run out in the row as well, so that the reaper could take the run.
            moment = time.monotonic() + stack.settings.lease_seconds
            eventually(lambda: time.monotonic() > moment)
        stack.until(run_id, "completed")
        (saved,) = [line["step"] for line in stack.journal(run_id) if line["event"] == "save" and line["attempt"] == 1]
        assert saved > before, "at half of the lease the trainer saved"
        assert steps_of(stack, run_id, 2)[0] == saved + 1
        assert losses(stack, run_id) == undisturbed
        assert_attempts_never_overlap(stack.journal(run_id))
        stored = printed(stack, run_id)
        ending = stored.index(saved + 1, stored.index(saved + 1) + 1) if stored.count(saved + 1) > 1 else saved
        first_attempt, second_attempt = stored[:ending], stored[ending:]
        # Killed between two steps or between a step and its line.
        assert first_attempt in (said, said[:-1])
        assert second_attempt == list(range(saved + 1, 151))
        reasons = [event["reason"] for event in stack.events(run_id) if event["type"] == "status"]
        assert any("the database was out of reach for" in reason for reason in reasons), reasons
