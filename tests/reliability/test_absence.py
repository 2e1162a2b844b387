"""Promise 19: the database goes away and comes back, for a moment or for longer than the lease."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.chaos.proxy import Proxies, Proxy
from tests.rows import events_of
from tests.stack import Stack, assert_attempts_never_overlap, is_alive, pids_of_trainers
from tests.waiting import eventually

LEASE_SECONDS = 6.0
"""Of which two thirds are longer than a stop of three seconds."""

SLOW = {"steps": 80, "step_seconds": 0.15, "log_lines_per_step": 1}
WITHOUT_OWN_CHECKPOINTS = {"save_steps": 1000}


def slow(stack: Stack) -> dict[str, Any]:
    """Options of a run whose steps, like the leases of the stack, are as long as the machine needs."""
    return {**SLOW, "step_seconds": 0.15 * stack.slowness}


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


@pytest.fixture(scope="module")
def proxies() -> Iterator[Proxies]:
    proxies = Proxies()
    yield proxies
    proxies.close()


@pytest.fixture
def way(stack: Stack, proxies: Proxies) -> Proxy:
    """A way to the database that can be cut."""
    return proxies.to(stack.settings.database_url or "")


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


@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.full), "killed"])
class TestShorterThanTwoThirdsOfTheLease:
    def test_training_goes_on_and_every_line_of_the_meantime_is_stored_in_order(
        self, stack: Stack, undisturbed: dict[int, str], how: str
    ) -> None:
        run_id = stack.create(SLOW)
        stack.add_worker(lease_seconds=180)
        stack.until_step(run_id, 5)
        with away(stack, how):
            before = last_step(stack, run_id)
            stack.until_step(run_id, before + 20)
        shown = stack.until(run_id, "completed")
        assert shown["attempt"] == 1
        assert printed(stack, run_id) == list(range(1, 81))
        assert losses(stack, run_id) == undisturbed


@pytest.mark.parametrize("how", ["stopped", pytest.param("killed", marks=pytest.mark.full)])
class TestLongerThanTheLease:
    def test_the_trainer_goes_what_it_said_is_stored_and_the_run_resumes_from_a_checkpoint_of_the_meantime(
        self, stack: Stack, undisturbed: dict[int, str], how: str
    ) -> None:
        run_id = stack.create(slow(stack), WITHOUT_OWN_CHECKPOINTS)
        stack.add_worker()
        stack.until_step(run_id, 10)
        (first,) = pids_of_trainers(stack.journal(run_id))
        with away(stack, how):
            before = last_step(stack, run_id)
            limit = stack.settings.lease_seconds
            eventually(lambda: not is_alive(first), timeout=limit, what="the trainer is gone before the lease is over")
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
        assert second_attempt == list(range(saved + 1, 81))
        reasons = [event["reason"] for event in stack.events(run_id) if event["type"] == "status"]
        assert any("the database was unreachable for" in reason for reason in reasons), reasons
        reported = stack.client.get(f"/v1/runs/{run_id}/postmortem").json()
        assert reported["probable_cause"].startswith("The database was unreachable") and reported["advice"] is None


class TestOfOneWorkerOnly:
    """Its way to the database is cut; the API, and perhaps other workers, still have theirs."""

    def test_absent_worker_loses_its_run_and_stores_nothing_more(
        self, stack: Stack, undisturbed: dict[int, str], way: Proxy
    ) -> None:
        run_id = stack.create(slow(stack), {"save_steps": 10})
        cut_off = stack.add_worker(database_url=way.url)
        stack.until_step(run_id, 15)
        way.fall_silent()
        stack.add_worker()
        eventually(lambda: steps_of(stack, run_id, 2), timeout=120, what="another worker takes the run")
        way.heal()
        eventually(lambda: f"{run_id}: fenced" in cut_off.log.read_text(), timeout=60, what="the first one hears of it")
        stack.until(run_id, "completed")
        assert losses(stack, run_id) == undisturbed
        assert_attempts_never_overlap(stack.journal(run_id))
        attempts = [event.attempt for event in events_of(stack.engine, run_id)]
        assert attempts == sorted(attempts), "nothing of the first attempt is stored after the second began"

    def test_a_stop_that_was_asked_for_meanwhile_wins(self, stack: Stack, way: Proxy) -> None:
        run_id = stack.create({**slow(stack), "steps": 100_000}, WITHOUT_OWN_CHECKPOINTS)
        # The trainer dies at two thirds of the lease. In the third that is left, the test must notice, stop and heal.
        stack.add_worker(database_url=way.url, lease_seconds=18 * stack.slowness)
        stack.until_step(run_id, 10)
        (trainer,) = pids_of_trainers(stack.journal(run_id))
        way.fall_silent()
        eventually(lambda: not is_alive(trainer), timeout=18 * stack.slowness)
        assert stack.stop(run_id).status_code == 202
        way.heal()
        shown = stack.until(run_id, "cancelled")
        assert shown["attempt"] == 1
        said = steps_of(stack, run_id, 1)
        assert printed(stack, run_id) in (said, said[:-1])
        (saved,) = [line["step"] for line in stack.journal(run_id) if line["event"] == "save"]
        assert [event["step"] for event in stack.events(run_id) if event["type"] == "checkpoint"] == [saved]

    @pytest.mark.full
    def test_a_worker_that_is_to_end_meanwhile_does_not_wait_for_ever(self, stack: Stack, way: Proxy) -> None:
        run_id = stack.create(slow(stack), WITHOUT_OWN_CHECKPOINTS)
        worker = stack.add_worker(database_url=way.url)
        stack.until_step(run_id, 10)
        (trainer,) = pids_of_trainers(stack.journal(run_id))
        way.fall_silent()
        eventually(lambda: not is_alive(trainer), timeout=60)
        assert worker.terminate(timeout=60) == 0, worker.log.read_text()[-3500:]
        stack.add_worker()
        stack.until(run_id, "completed")


class TestADiskThatTakesNothing:
    def test_makes_the_trainer_wait_which_is_no_hang_and_loses_no_line(self, stack: Stack) -> None:
        spool = stack.home / "spool"
        if spool.exists():
            spool.rmdir()
        spool.write_text("in the way")
        # As many and as long lines as are stored uncut: 8 MiB in some five seconds.
        much = {
            "steps": 100_000,
            "step_seconds": 0.02,
            "log_lines_per_step": 4,
            "log_line": "step {step} " + "x" * 7900,
        }
        run_id = stack.create(much, WITHOUT_OWN_CHECKPOINTS)
        worker = stack.add_worker(lease_seconds=60, hang_seconds=8 * stack.slowness)
        stack.until_step(run_id, 5)
        with away(stack, "stopped"):
            waits = "training waits until the database"
            eventually(lambda: waits in worker.log.read_text(), timeout=120, what="the head is full")
            step, moment = last_step(stack, run_id), time.monotonic() + 10 * stack.slowness
            eventually(lambda: time.monotonic() > moment)
            assert last_step(stack, run_id) <= step + 20, "only what fits into the kernel's queue"
        stack.until_step(run_id, step + 30)
        stack.stop(run_id, save_checkpoint=False)
        assert stack.until(run_id, "cancelled")["attempt"] == 1
        steps = steps_of(stack, run_id, 1)
        assert printed(stack, run_id) == [step for step in steps for _ in range(4)]
        spool.unlink()
