"""Promises 1 to 6 of the service: what happens to runs when a process of it dies or stalls."""

import signal
import threading
from typing import Any

import httpx
import psutil
import pytest

from tests.stack import Follower, Stack, assert_attempts_never_overlap, is_alive, pids_of_trainers, signal_process
from tests.waiting import eventually

SLOW = {"steps": 60, "step_seconds": 0.05, "log_lines_per_step": 1}
HELD = {**SLOW, "hang_at_step": 30, "faults_until_attempt": 1}
"""Its first attempt does not end by itself, however long the test takes to disturb it."""


def losses(stack: Stack, run_id: str) -> dict[int, str]:
    """Step → exact loss as the last attempt that ran the step wrote it down."""
    return {line["step"]: line["loss_hex"] for line in stack.journal(run_id) if line["event"] == "step"}


@pytest.fixture(scope="module")
def undisturbed(shared_stack: Stack) -> dict[int, str]:
    """The losses of a run that nobody disturbs."""
    worker = shared_stack.add_worker()
    run_id = shared_stack.create(SLOW, {"save_steps": 10})
    shared_stack.until(run_id, "completed")
    worker.kill()
    return losses(shared_stack, run_id)


def assert_as_if_nothing_had_happened(stack: Stack, run_id: str, undisturbed: dict[int, str]) -> None:
    shown = stack.until(run_id, "completed")
    assert losses(stack, run_id) == undisturbed
    assert_attempts_never_overlap(stack.journal(run_id))
    events = stack.events(run_id)
    assert events[-1] == {**events[-1], "type": "end", "status": "completed"}
    attempts = [event["attempt"] for event in events if event["type"] == "status"]
    assert attempts == sorted(attempts)
    assert shown["current_step"] == 60


class TestAcceptedIsDurable:
    def test_a_run_that_was_answered_exists_after_kill_9_of_api_and_postgres(self, stack: Stack) -> None:
        accepted: list[tuple[str, str]] = []
        over = threading.Event()

        def create(number: int) -> None:
            config = {"base_model": "any", "method": "sft", "extra": {}}
            body = {"backend": "fake", "dataset_id": stack.dataset_id, "config": config}
            count = 0
            with stack.api.client_with(stack.api.key) as client:
                # A little apart: without a pause they only take the processor from the server that starts again.
                while not over.wait(0.1):
                    key = f"{number}-{count}"
                    try:
                        answer = client.post("/v1/runs", json=body, headers={"Idempotency-Key": key}, timeout=60)
                    except httpx.HTTPError:
                        continue  # the same key again: perhaps it was accepted
                    if answer.status_code == 202:
                        accepted.append((key, answer.json()["id"]))
                        count += 1

        clients = [threading.Thread(target=create, args=(number,)) for number in range(4)]
        for client in clients:
            client.start()
        before = len(accepted)
        eventually(lambda: len(accepted) > before + 8)
        stack.api.kill()
        stack.api.start()
        stack.api.wait_until_up()
        restarted = len(accepted)
        eventually(lambda: len(accepted) > restarted + 8)
        stack.kill_postgres()
        over.set()
        for client in clients:
            client.join(120)
        keys = [key for key, _ in accepted]
        assert len(keys) == len(set(keys))
        for key, run_id in accepted[:: max(1, len(accepted) // 10)]:
            assert stack.run(run_id)["id"] == run_id
            config = {"base_model": "any", "method": "sft", "extra": {}}
            again = stack.client.post(
                "/v1/runs",
                json={"backend": "fake", "dataset_id": stack.dataset_id, "config": config},
                headers={"Idempotency-Key": key},
            )
            assert again.json()["id"] == run_id
        for _, run_id in accepted:
            stack.stop(run_id)


class TestNoRunIsLost:
    def test_when_every_hint_is_lost(self, stack: Stack) -> None:
        run_id = stack.create({"steps": 2})
        stack.redis().flushall()
        stack.add_worker()
        stack.until(run_id, "completed", timeout=60)

    def test_when_valkey_is_away_at_launch(self, stack: Stack) -> None:
        worker = stack.add_worker()
        valkey = stack.servers.valkey
        assert valkey is not None
        psutil.Process(valkey.process.pid).kill()
        valkey.process.wait(30)
        run_id = stack.create({"steps": 2})
        assert stack.run(run_id)["status"] == "pending"
        valkey.start()
        valkey.wait_ready()
        stack.until(run_id, "completed", timeout=120)
        assert worker.process.poll() is None

    def test_duplicate_and_late_hints_start_it_once(self, stack: Stack) -> None:
        from app.infra.broker import TASK, celery_app

        run_id = stack.create({"steps": 3})
        celery = celery_app(stack.settings.redis_url or "")
        for _ in range(30):
            celery.send_task(TASK)
        stack.add_worker(slots=4)
        for _ in range(30):
            celery.send_task(TASK)
        stack.until(run_id, "completed")
        assert len(pids_of_trainers(stack.journal(run_id))) == 1


class TestDeathOfAProcess:
    def test_run_completes_after_death_of_the_worker(self, stack: Stack, undisturbed: dict[int, str]) -> None:
        run_id = stack.create(HELD, {"save_steps": 10})
        worker = stack.add_worker(lease_seconds=120)
        follower = Follower(stack, run_id, reconnect_every=7)
        stack.until_step(run_id, 25)
        (trainer,) = pids_of_trainers(stack.journal(run_id))
        worker.kill()
        # Long before its own timer, which ends it at two thirds of the lease.
        eventually(lambda: not is_alive(trainer), timeout=60, what="the trainer dies with its worker")
        stack.add_worker()
        assert_as_if_nothing_had_happened(stack, run_id, undisturbed)
        ids = follower.join()
        assert ids == list(range(1, len(ids) + 1))
        assert stack.run(run_id)["attempt"] == 2

    @pytest.mark.full
    def test_run_completes_after_death_of_the_api(self, stack: Stack, undisturbed: dict[int, str]) -> None:
        run_id = stack.create(SLOW, {"save_steps": 10})
        stack.add_worker()
        follower = Follower(stack, run_id)
        stack.until_step(run_id, 15)
        stack.api.kill()
        stack.until_step(run_id, 30)
        stack.api.start()
        stack.api.wait_until_up()
        assert_as_if_nothing_had_happened(stack, run_id, undisturbed)
        ids = follower.join()
        assert ids == list(range(1, len(ids) + 1))
        assert stack.run(run_id)["attempt"] == 1

    def test_run_completes_after_death_of_postgres(self, stack: Stack, undisturbed: dict[int, str]) -> None:
        run_id = stack.create(SLOW, {"save_steps": 10})
        stack.add_worker()
        follower = Follower(stack, run_id)
        stack.until_step(run_id, 15)
        stack.kill_postgres()
        assert_as_if_nothing_had_happened(stack, run_id, undisturbed)
        ids = follower.join()
        assert ids == list(range(1, len(ids) + 1))

    def test_run_completes_after_death_of_valkey(self, stack: Stack, undisturbed: dict[int, str]) -> None:
        run_id = stack.create(SLOW, {"save_steps": 10})
        stack.add_worker()
        follower = Follower(stack, run_id)
        stack.until_step(run_id, 15)
        stack.kill_valkey()
        assert_as_if_nothing_had_happened(stack, run_id, undisturbed)
        ids = follower.join()
        assert ids == list(range(1, len(ids) + 1))
        assert stack.run(run_id)["attempt"] == 1

    def test_run_survives_repeated_trainer_deaths_while_checkpoints_advance(
        self, stack: Stack, undisturbed: dict[int, str]
    ) -> None:
        held = {**SLOW, "step_seconds": 0.3, "hang_at_step": 36, "faults_until_attempt": 2}
        run_id = stack.create(held, {"save_steps": 10}, max_restarts=1)
        stack.add_worker()
        for attempt, step in ((1, 12), (2, 35)):
            stack.until_step(run_id, step)
            signal_process(pids_of_trainers(stack.journal(run_id))[attempt - 1], signal.SIGKILL)
        assert_as_if_nothing_had_happened(stack, run_id, undisturbed)
        shown = stack.run(run_id)
        assert (shown["attempt"], shown["end_reason"]) == (3, "finished")
        reasons = [event["reason"] for event in stack.events(run_id) if event["type"] == "status"]
        assert sum("ended with signal 9" in reason for reason in reasons) == 2


class TestAFrozenSupervisor:
    def test_frozen_supervisor_loses_its_trainer_before_another_starts(
        self, stack: Stack, undisturbed: dict[int, str]
    ) -> None:
        run_id = stack.create(HELD, {"save_steps": 10})
        frozen = stack.add_worker(lease_seconds=stack.short_lease)
        stack.until_step(run_id, 12)
        (first,) = pids_of_trainers(stack.journal(run_id))
        frozen.freeze()
        stack.add_worker()

        def second_start() -> list[dict[str, Any]]:
            return [line for line in stack.journal(run_id) if line["event"] == "start" and line["attempt"] == 2]

        eventually(second_start, timeout=120, what="another worker takes the run")
        assert not is_alive(first)
        frozen.thaw()  # after several lease times it wakes up and believes that the run is still its own
        assert_as_if_nothing_had_happened(stack, run_id, undisturbed)
        attempts = [event["attempt"] for event in stack.events(run_id) if "attempt" in event]
        assert attempts == sorted(attempts)

        def has_noticed() -> bool:
            # Whichever of its threads wakes up first: the one that counts the lease or one that asks the database.
            said = frozen.log.read_text()
            return f"{run_id}: its lease ran out" in said or "fenced" in said

        eventually(has_noticed, timeout=60, what="the frozen worker notices")

    def test_the_trainer_dies_by_its_own_timer(self, stack: Stack) -> None:
        run_id = stack.create({**SLOW, "steps": 2000})
        frozen = stack.add_worker(lease_seconds=stack.short_lease)
        stack.until_step(run_id, 3)
        (trainer,) = pids_of_trainers(stack.journal(run_id))
        frozen.freeze()
        # Nobody else is there who could kill it.
        eventually(lambda: not is_alive(trainer), timeout=stack.short_lease, what="it ends before its lease")
        frozen.thaw()
        stack.stop(run_id)
        stack.until(run_id, "cancelled")
