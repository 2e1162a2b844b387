"""Promises 8 and 9: an accepted stop wins in every phase, and is bounded in time."""

import time

import pytest

from tests.stack import Stack, is_alive, pids_of_trainers

PHASES = {
    "loading": ({"load_seconds": 30}, "initializing"),
    "training": ({"steps": 2000, "step_seconds": 0.05}, "running"),
    "saving": ({"steps": 2000, "step_seconds": 0.02, "save_seconds": 2}, "checkpointing"),
}


class TestStopWins:
    def test_stop_wins_while_the_run_waits(self, stack: Stack) -> None:
        run_id = stack.create()
        assert stack.stop(run_id).json()["status"] == "cancelled"
        stack.add_worker()
        other = stack.create({"steps": 1})
        stack.until(other, "completed")
        assert stack.run(run_id)["status"] == "cancelled"
        assert stack.journal(run_id) == []

    @pytest.mark.parametrize("phase", PHASES)
    @pytest.mark.usefixtures("worker")
    def test_stop_wins_while_the_run_is_active(self, stack: Stack, phase: str) -> None:
        extra, status = PHASES[phase]
        run_id = stack.create(extra, {"save_steps": 5})
        stack.until(run_id, status)
        assert stack.stop(run_id).status_code == 202
        shown = stack.until(run_id, "cancelled", timeout=60)
        assert stack.stop(run_id).status_code == 202, "a stop of a stopped run is accepted again"
        assert all(not is_alive(pid) for pid in pids_of_trainers(stack.journal(run_id)))
        if phase != "loading":
            assert [event for event in stack.events(run_id) if event["type"] == "checkpoint"]
            assert shown["checkpoint_path"]

    def test_stop_wins_while_the_worker_is_lost(self, stack: Stack) -> None:
        run_id = stack.create({"steps": 2000})
        worker = stack.add_worker()
        stack.until_step(run_id, 3)
        worker.kill()
        assert stack.stop(run_id).status_code == 202
        stack.add_worker()
        stack.until(run_id, "cancelled", timeout=60)
        assert len(pids_of_trainers(stack.journal(run_id))) == 1

    @pytest.mark.usefixtures("worker")
    def test_not_over_a_run_that_has_ended(self, stack: Stack) -> None:
        run_id = stack.create({"steps": 1})
        stack.until(run_id, "completed")
        answer = stack.stop(run_id)
        assert answer.status_code == 409
        assert "completed" in answer.json()["detail"]


class TestStopIsBounded:
    def test_a_trainer_that_does_not_listen_is_killed_after_the_grace(self, stack: Stack) -> None:
        run_id = stack.create({"steps": 5000, "ignore_stop": True})
        stack.add_worker(lease_seconds=stack.short_lease)
        stack.until_step(run_id, 3)
        began = time.monotonic()
        stack.stop(run_id)
        stack.until(run_id, "cancelled")
        took = time.monotonic() - began
        grace = 2 * stack.short_lease
        assert grace - 0.5 < took < grace + 30

    def test_without_a_checkpoint_it_is_quick_and_saves_none(self, stack: Stack) -> None:
        run_id = stack.create({"steps": 5000})
        stack.add_worker(lease_seconds=60)  # the grace is twice as long
        stack.until_step(run_id, 3)
        stack.stop(run_id, save_checkpoint=False)
        stack.until(run_id, "cancelled", timeout=60)
        assert not [event for event in stack.events(run_id) if event["type"] == "checkpoint"]

    @pytest.mark.usefixtures("worker")
    def test_the_log_is_whole_before_the_last_status(self, stack: Stack) -> None:
        run_id = stack.create({"steps": 5000, "log_lines_per_step": 20})
        stack.until_step(run_id, 10)
        stack.stop(run_id)
        stack.until(run_id, "cancelled")
        events = stack.events(run_id)
        last_step = max(line["step"] for line in stack.journal(run_id) if line["event"] == "step")
        lines = [event["line"] for event in events if event["type"] == "log" and event["stream"] == "stdout"]
        assert sum(line.startswith(f"step {last_step} ") for line in lines) == 20
        assert [event["type"] for event in events[-2:]] == ["status", "end"]


class TestDrain:
    def test_sigterm_saves_releases_and_loses_nothing(self, stack: Stack) -> None:
        run_id = stack.create({"steps": 40, "step_seconds": 0.2}, {"save_steps": 1000})
        worker = stack.add_worker()
        stack.until_step(run_id, 5)
        assert worker.terminate() == 0
        shown = stack.run(run_id)
        assert shown["status"] == "pending"
        saved = [event["step"] for event in stack.events(run_id) if event["type"] == "checkpoint"]
        assert saved and saved[-1] >= 5
        stack.add_worker()
        stack.until(run_id, "completed")
        steps = [line["step"] for line in stack.journal(run_id) if line["event"] == "step"]
        assert steps == list(range(1, 41)), "no step was trained twice"
