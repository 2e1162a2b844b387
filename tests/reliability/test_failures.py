"""Every end that is not a good one has a stable code, says what happened, and is the right one."""

import json
import shutil
from typing import Any

import pytest
from sqlalchemy import text

from tests.stack import Stack
from tests.waiting import eventually

CRASHES: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "exception": ({"crash_at_step": 3, "crash": "exception"}, "internal", "", 1),
    "segv": ({"crash_at_step": 3, "crash": "segv"}, "trainer_crashed", "signal 11", 2),
    "kill": ({"crash_at_step": 3, "crash": "kill"}, "trainer_crashed", "signal 9", 2),
    "exit": ({"crash_at_step": 3, "crash": "exit"}, "trainer_crashed", "exit code", 1),
    "memory": ({"crash_at_step": 3, "crash": "memory"}, "out_of_memory", "", 4),
    "reported": ({"fail_at_step": 3, "fail_code": "bad_data"}, "bad_data", "", 1),
    "non_finite": ({"non_finite_at_step": 3}, "non_finite_loss", "", 1),
}
"""Options, error code, part of the message and number of attempts. A signal is final when it recurs at one step, and a
lack of memory after all repairs."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.full if kind in ("kill", "reported", "exit") else ()) for kind in CRASHES],
)
@pytest.mark.usefixtures("worker")
def test_a_crash_is_classified_and_shows_its_last_lines(stack: Stack, kind: str) -> None:
    extra, code, says, attempts = CRASHES[kind]
    run_id = stack.create({"steps": 20, "step_seconds": 0.01, **extra})
    shown = stack.until(run_id, "failed", "completed", "cancelled")
    assert (shown["status"], shown["error_code"], shown["attempt"]) == ("failed", code, attempts)
    assert says in shown["error_message"]
    events = stack.events(run_id)
    assert [event["type"] for event in events[-3:]] == ["error", "status", "end"]
    assert any("step 2 loss" in event.get("line", "") for event in events), "its last lines are in the log"
    if code == "trainer_crashed":
        assert "step 2 loss" not in shown["error_message"] and f"anneal runs why {run_id}" in shown["error_message"]
        postmortem = stack.client.get(f"/v1/runs/{run_id}/postmortem").json()
        assert any("step 2 loss" in line for line in postmortem["last_lines"])


def test_a_device_that_fails_pauses_and_its_run_goes_on_on_another(stack: Stack) -> None:
    broken = {"fail_at_step": 3, "fail_code": "device_error"}
    first = stack.create({"steps": 6, "step_seconds": 0.01, **broken, "faults_until_attempt": 1})
    worker = stack.add_worker(slots=2)
    assert stack.until(first, "failed", "completed")["attempt"] == 2
    assert stack.run(first)["status"] == "completed"
    cause = stack.client.get(f"/v1/runs/{first}/postmortem").json()["probable_cause"]
    assert cause.endswith("Another attempt resumes from the last checkpoint.")
    second = stack.create({"steps": 3, "step_seconds": 0.0})
    assert stack.until(second, "failed", "completed")["status"] == "completed"
    (shown,) = [row for row in stack.client.get("/v1/workers").json()["data"] if row["pid"] == worker.process.pid]
    paused, other = shown["devices"]
    assert paused["trouble"] and paused["paused_until"] > shown["heartbeat_at"]
    assert (other["trouble"], other["paused_until"]) == (None, None)
    last = stack.create({"steps": 6, "step_seconds": 0.01, **broken}, max_restarts=0)
    shown = stack.until(last, "failed", "completed")
    assert (shown["status"], shown["error_code"]) == ("failed", "device_error")
    # Both devices pause now, so nothing is claimed any more.
    assert stack.run(stack.create({"steps": 1}))["status"] == "pending"


def test_an_error_of_the_database_is_in_the_workers_log_alone(stack: Stack) -> None:
    """Its text has statements and values, which may be those of other users."""
    run_id = stack.create({"steps": 1})
    rename = text("ALTER TABLE datasets RENAME COLUMN sha256 TO moved")
    back = text("ALTER TABLE datasets RENAME COLUMN moved TO sha256")
    status = text("SELECT status FROM runs WHERE id = :id")
    with stack.engine.begin() as connection:
        connection.execute(rename)
    try:
        worker = stack.add_worker()
        with stack.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            eventually(lambda: connection.scalar(status, {"id": run_id}) == "failed")
    finally:
        with stack.engine.begin() as connection:
            connection.execute(back)
    shown = stack.run(run_id)
    assert shown["error_code"] == "internal" and "ProgrammingError" in shown["error_message"]
    told = json.dumps([shown, *stack.events(run_id)])
    assert "SELECT" not in told and "does not exist" not in told
    assert "does not exist" in worker.log.read_text()


@pytest.mark.usefixtures("worker")
def test_limits_of_the_configuration_end_a_run_with_a_saved_state(stack: Stack) -> None:
    limited = stack.create({"steps": 100_000, "step_seconds": 0.02}, {"time_limit_seconds": 1})
    shown = stack.until(limited, "failed", "completed")
    assert (shown["status"], shown["end_reason"], shown["error_code"]) == ("completed", "time_limit", None)
    assert shown["checkpoint_path"] and shown["fine_tuned_model"]
    resumed = stack.client.post(f"/v1/runs/{limited}/resume", json={"config": {"time_limit_seconds": 0.1}})
    assert resumed.status_code == 202, resumed.text
    more = stack.until(resumed.json()["id"], "failed", "completed")
    assert more["end_reason"] == "time_limit" and more["current_step"] > shown["current_step"]
    planned = stack.create({"steps": 100_000, "step_seconds": 0.01}, {"stop_at_step": 7})
    shown = stack.until(planned, "failed", "completed")
    assert (shown["status"], shown["end_reason"], shown["current_step"]) == ("completed", "stop_at_step", 7)


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(stack: Stack) -> None:
    run_id = stack.create({"steps": 400, "step_seconds": 0.02}, {"save_steps": 10, "save_total_limit": None})
    worker = stack.add_worker()
    stack.until_step(run_id, 35)
    worker.kill()
    folder = stack.settings.storage_root / "runs" / run_id / "a1"
    saved = stack.client.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
    newest = max(saved, key=lambda checkpoint: checkpoint["step"])
    place = folder / f"checkpoint-{newest['step']}"
    victim = max((path for path in place.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    stack.add_worker()

    def second_start() -> list[int]:
        return [line["step"] for line in stack.journal(run_id) if line["attempt"] == 2 and line["event"] == "step"]

    eventually(second_start, timeout=60)
    assert min(second_start()) == newest["step"] - 10 + 1
    lines = [event["line"] for event in stack.events(run_id) if event["type"] == "log"]
    assert any(newest["id"] in line and "cannot be resumed from" in line for line in lines)
    stack.stop(run_id)
    stack.until(run_id, "cancelled")


def test_a_poison_run_is_not_tried_for_ever(stack: Stack) -> None:
    """A run that takes its whole worker down each time ends as failed, not in a loop."""
    run_id = stack.create({"steps": 400, "step_seconds": 0.02}, {"save_steps": 1000}, max_restarts=1)
    for attempt in (1, 2):
        worker = stack.add_worker()
        eventually(
            lambda attempt=attempt: any(
                line["attempt"] == attempt and line["event"] == "step" for line in stack.journal(run_id)
            ),
            timeout=60,
        )
        worker.kill()
    stack.add_worker()
    shown = stack.until(run_id, "failed", timeout=60)
    assert shown["error_code"] == "worker_lost"
    assert "max_restarts is 1" in json.dumps(shown)


@pytest.mark.usefixtures("worker")
def test_output_of_every_kind_arrives_in_order_as_log_events(stack: Stack) -> None:
    run_id = stack.create({"steps": 30, "step_seconds": 0.0, "log_lines_per_step": 10})
    stack.until(run_id, "completed")
    lines = [event["line"] for event in stack.events(run_id) if event["type"] == "log" and event["stream"] == "stdout"]
    steps = [int(line.split()[1]) for line in lines]
    assert steps == sorted(steps) and len(steps) == 300


def test_a_worker_that_does_not_see_the_storage_costs_a_run_nothing(stack: Stack) -> None:
    """It is idle, so it would take the run again and again: it takes none, and passes on what it hears of."""
    run_id = stack.create({"steps": 3, "step_seconds": 0.0}, max_restarts=0)
    datasets = stack.settings.storage_root / "datasets"
    datasets.rename(datasets.with_name("not-mounted"))
    worker = stack.add_worker()
    eventually(lambda: "holds no datasets" in worker.log.read_text(), timeout=60)
    shown = stack.run(run_id)
    assert (shown["status"], shown["attempt"]) == ("pending", 0)
    datasets.with_name("not-mounted").rename(datasets)
    assert stack.until(run_id, "completed", "failed")["status"] == "completed"


def test_a_run_that_cannot_be_started_is_not_tried_for_ever_and_keeps_no_other_waiting(stack: Stack) -> None:
    """Its dataset is gone from the storage, all else is there."""
    lost = stack.create({"steps": 3}, max_restarts=0, priority=5, dataset_id=stack.upload(b'{"text": "gone"}\n'))
    shutil.rmtree(stack.settings.storage_root / "datasets" / stack.run(lost)["dataset_id"])
    other = stack.create({"steps": 3, "step_seconds": 0.0})
    stack.add_worker()
    shown = stack.until(lost, "failed", "completed")
    assert shown["error_code"] == "worker_lost" and "is not in this worker's storage" in shown["error_message"]
    assert stack.until(other, "completed", "failed")["status"] == "completed"
